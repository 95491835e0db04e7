"""What several tests of TLS share."""

import pytest

from telegrad.transport import tls


@pytest.fixture(scope="module")
def ends() -> tls.TlsEnds:
    """Both ends of a connection that know each other by their fingerprints."""
    made = tls.ends_by_fingerprint()
    assert made is not None
    return made
