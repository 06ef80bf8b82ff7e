"""What a forward under test comes to by importing it as it runs."""

calls = 0
