"""Support for each training library, below the modules that scripts import."""
