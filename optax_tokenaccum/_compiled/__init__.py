"""What a compiled program sends between devices."""
