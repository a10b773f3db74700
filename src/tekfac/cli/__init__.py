"""The command line `tekfac`, a module for each command."""
