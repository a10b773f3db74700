"""The mathematics: factors, eigenbasis, re-scaling and the natural gradient, of a layer and of a network."""
