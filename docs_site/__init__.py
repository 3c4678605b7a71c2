"""What builds the documentation: generated pages and pictures, and the site (``make docs``). Not in the wheel."""
