"""The benchmark: what a step of an optimizer costs beside one of SGD, in time, in memory and by counting.

Whatever is measured runs in a process of its own (`worker`), started one at a time (`processes`); `running`
puts the measurements of a network together, `result` keeps them in a folder, and `summary`, `tables` and
`figures` say what came out. The command line is `tekfac bench`.
"""
