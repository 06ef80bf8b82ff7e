from collections.abc import Iterator

import pytest

from autockpt.analysis import diagnose, explain
from autockpt.schema import SearchSpace


@pytest.fixture(scope="module")
def few_choices() -> Iterator[None]:
    """For tests that do not depend on which choices there are: each is some ghost runs more in every answer."""
    few = SearchSpace().restricted(("save", "recompute", "offload", "chunked_softmax"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (diagnose, explain):
            patch.setattr(module, "SearchSpace", lambda: few)
        yield
