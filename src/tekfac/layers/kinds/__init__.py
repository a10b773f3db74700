"""Kinds of layers: how each type of module uses its parameters. To add one, see base.py and docs/layers.md."""
