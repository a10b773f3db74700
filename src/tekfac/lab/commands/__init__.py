"""The lab on the command line: one module per command."""
