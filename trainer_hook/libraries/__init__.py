"""What is known of each library: the parts that no script imports by name."""
