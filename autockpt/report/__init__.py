"""What other packages computed, drawn for a terminal."""

from autockpt.report.answer import answer_rows, print_answer
from autockpt.report.bench_page import bench_page
from autockpt.report.bench_picture import bench_picture
from autockpt.report.bench_view import print_bench
from autockpt.report.estimate_view import print_estimates
from autockpt.report.graph_summary import GraphSummary, summarise
from autockpt.report.hardware_view import hardware_rows, print_hardware
from autockpt.report.progress import BarListener, LineListener, listener
from autockpt.report.trace_view import print_device_peak, print_ops, print_summary
from autockpt.report.trials_view import print_trials
from autockpt.report.verify_view import print_report

__all__ = [
    "BarListener",
    "GraphSummary",
    "LineListener",
    "answer_rows",
    "bench_page",
    "bench_picture",
    "hardware_rows",
    "listener",
    "print_answer",
    "print_bench",
    "print_device_peak",
    "print_estimates",
    "print_hardware",
    "print_ops",
    "print_report",
    "print_summary",
    "print_trials",
    "summarise",
]
