"""Fisher blocks as objects: positive semi-definite matrices over the parameters of one layer.

KroneckerBlock   Q diag(S) Q^T with Q = Q_out (x) Q_in     what the four methods approximate F by
DenseBlock       F itself
GramBlock        F = J^T J / M, known by its rows J        F itself, where rows are fewer than parameters
BlockDiagonal    blocks by layer name                      the matrix of a whole network
"""
