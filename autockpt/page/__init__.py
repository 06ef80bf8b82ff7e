"""A run as one offline HTML page: what was found, why, and what other budgets would buy."""

from autockpt.page.render import PAGE, write_page
