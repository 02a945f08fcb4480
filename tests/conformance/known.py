"""What the suite has found and is not mended yet."""

import pytest

# A decode batch with a grammar is made before the last step's results are processed and launched after: requests that they
# end are in it, and `RequestTracker` opens their sessions anew. They are closed after UNSEEN_SECONDS.
REOPENED = pytest.mark.xfail(
    strict=True, reason="a request that has ended in a batch with a grammar is opened anew"
)
