"""What other packages computed, drawn for a terminal."""

from autockpt.reporting.answer import print_answer
from autockpt.reporting.bench_picture import bench_picture
from autockpt.reporting.bench_view import bench_page, print_bench
from autockpt.reporting.estimate_view import print_estimates
from autockpt.reporting.hardware_view import print_hardware
from autockpt.reporting.progress import listener
from autockpt.reporting.trace_view import print_device_peak, print_ops, print_summary, summarise
from autockpt.reporting.trials_view import print_trials
from autockpt.reporting.verify_view import print_report
