"""The lab: training runs, comparisons, sweeps and reports; the paper's experiments among them.

The command line is `tekfac compare`, `train`, `sweep`, `reproduce`, `report` and `data`; its guide is
docs/lab.md.
"""
