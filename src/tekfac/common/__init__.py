"""What the other packages share and none owns: checks of values, optional packages, files, the terminal."""
