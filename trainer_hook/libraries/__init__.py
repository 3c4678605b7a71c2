"""One driver for each training library, and patches of the library; below the modules that scripts import."""
