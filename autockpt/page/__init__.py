"""A run as one offline HTML page: what was found, why, and what other budgets would buy."""

from autockpt.page.render import PAGE, compare_page, write_comparison, write_page
