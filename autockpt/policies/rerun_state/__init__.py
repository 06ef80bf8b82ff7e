"""What a unit's forward reads and changes beside its arguments, for running it again: restored, and put back after."""
