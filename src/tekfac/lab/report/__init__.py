"""Reports of training runs: what their folders say, as tables, figures and one page to look at."""

from tekfac.lab.report.runs import find_runs
from tekfac.lab.report.writing import Asked, present, require_reports, write_report

__all__ = ["Asked", "find_runs", "present", "require_reports", "write_report"]
