"""Exit codes of all commands (FORMAT.md, "Exit codes"); 0 is success."""

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_GIVEN_UP = 3
