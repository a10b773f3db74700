"""The version of the library, on its own so that a build can read it without importing torch."""

__version__ = "0.4.0"
