"""What other packages computed, drawn for a terminal."""
