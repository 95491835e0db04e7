"""The handshake without a socket: who proves what, and what each wrong byte leads to."""

import hashlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError
from telegrad.transport import handshake
from telegrad.transport.handshake import (
    MAGIC,
    MAX_HELLO,
    PROTOCOL,
    DiallerHandshake,
    Hello,
    ListenerHandshake,
    Refused,
    Welcome,
)

HELLO = Hello(1, "worker1", 11, 0, 1, True, "main")
WELCOME = Welcome(0, "worker0", 10, False, True, "main")
SECRET = b"the job's secret"


def test_both_prove_themselves() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    _feed_in_steps(listener, dialler.answer(listener.feed(dialler.opening), HELLO))
    assert listener.hello == HELLO
    raw = listener.welcome(WELCOME)
    code, length = dialler.verdict_length(raw[: dialler.verdict_header_bytes])
    assert dialler.verdict(code, raw[dialler.verdict_header_bytes :]) == WELCOME
    assert length == len(raw) - dialler.verdict_header_bytes


def test_what_is_shown_of_it_has_no_secrets() -> None:
    for said in (
        Hello(1, "a", 2, 3, 4, False, "", ticket=b"key 1", seal=b"key 2"),
        msgspec.structs.replace(WELCOME, seal=b"key 3"),
    ):
        assert "name=" in repr(said) and "seal=..." in repr(said) and "key" not in repr(said)


def _feed_in_steps(listener: ListenerHandshake, raw: bytes, piece: int = 10_000) -> None:
    while raw:
        count = min(listener.needs, piece)
        assert 0 < count <= MAX_HELLO
        listener.feed(raw[:count])
        raw = raw[count:]


def test_byte_by_byte() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    answer = b"".join(listener.feed(dialler.opening[i : i + 1]) for i in range(len(dialler.opening)))
    _feed_in_steps(listener, dialler.answer(answer, HELLO), piece=1)
    assert listener.hello == HELLO


def test_a_listener_without_the_secret_learns_nothing() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(b"wrong")
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        dialler.answer(listener.feed(dialler.opening), HELLO)


def test_a_dialler_without_the_secret_is_refused() -> None:
    dialler, listener = DiallerHandshake(b"wrong"), ListenerHandshake(SECRET)
    listener.feed(dialler.opening)
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        listener.feed(b"\0" * listener.needs)


def test_a_recorded_proof_is_worthless() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    recorded = dialler.answer(listener.feed(dialler.opening), HELLO)
    again = ListenerHandshake(SECRET)
    again.feed(dialler.opening)
    with pytest.raises(AuthenticationError):
        again.feed(recorded[: again.needs])


def test_a_proof_cannot_be_reflected() -> None:
    dialler = DiallerHandshake(SECRET)
    with pytest.raises(AuthenticationError):
        dialler.answer(dialler.opening + b"\0" * 32, HELLO)


def test_a_worker_is_not_made_to_talk_to_itself() -> None:
    """A stranger that a worker dials sends all it says to the same worker's listener, and back: the roles differ."""
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    answer = dialler.answer(listener.feed(dialler.opening), HELLO)
    proof_of_listener = ListenerHandshake(SECRET).feed(dialler.opening)[-32:]
    for other in (DiallerHandshake(SECRET), dialler):  # the proof of a dialler is none of a listener
        with pytest.raises(AuthenticationError):
            other.answer(other.opening + answer[:32], HELLO)
    with pytest.raises(AuthenticationError):  # nor the other way round
        _feed_in_steps(listener, proof_of_listener + answer[32:])


def test_a_verdict_of_another_connection() -> None:
    ends = [(DiallerHandshake(SECRET), ListenerHandshake(SECRET)) for _ in range(2)]
    for dialler, listener in ends:
        _feed_in_steps(listener, dialler.answer(listener.feed(dialler.opening), HELLO))
    (dialler, _), (_, other) = ends
    raw = other.welcome(WELCOME)
    code, _ = dialler.verdict_length(raw[: dialler.verdict_header_bytes])
    with pytest.raises(AuthenticationError, match="changed"):
        dialler.verdict(code, raw[dialler.verdict_header_bytes :])


def test_what_ends_too_soon_is_not_taken() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    answer = dialler.answer(listener.feed(dialler.opening), HELLO)
    _feed_in_steps(listener, answer[:-1])
    assert listener.hello is None and listener.needs == 1


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"T", b"TG", MAGIC[:3] + b"X"])
def test_strangers_are_known_by_their_first_bytes(opening: bytes) -> None:
    listener = ListenerHandshake(SECRET)
    if MAGIC.startswith(opening):
        assert listener.feed(opening) == b""  # it may yet become one of ours
    else:
        with pytest.raises(ProtocolError, match="not this protocol"):
            listener.feed(opening)


def test_another_version() -> None:
    opening = bytearray(DiallerHandshake(SECRET).opening)
    opening[len(MAGIC)] = PROTOCOL + 1
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL + 1}"):
        ListenerHandshake(SECRET).feed(bytes(opening))


class _Verbose(DiallerHandshake):
    """Knows the secret and says any hello."""

    def answer_with(self, raw: bytes, body: bytes, length: int | None = None) -> bytes:
        self._transcript.say(handshake._check_opening(raw[: handshake._OPENING.size]))
        digest, length = hashlib.sha256(body).digest(), len(body) if length is None else length
        self._transcript.say(digest + length.to_bytes(4, "little"))
        return handshake._ANSWER.pack(self._transcript.proof(b"dialler"), digest, length) + body


def test_a_hello_that_is_too_long_or_none() -> None:
    for length in (0, MAX_HELLO + 1, 2**32 - 1):
        dialler, listener = _Verbose(SECRET), ListenerHandshake(SECRET)
        answer = dialler.answer_with(listener.feed(dialler.opening), b"", length)
        with pytest.raises(ProtocolError, match="hello"):
            listener.feed(answer[: listener.needs])


@pytest.mark.parametrize("where", range(0, 120, 7))
def test_a_hello_that_was_changed_on_its_way(where: int) -> None:
    """Whoever passes the bytes on cannot claim another name, nor want another incarnation."""
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    answer = bytearray(dialler.answer(listener.feed(dialler.opening), HELLO))
    answer[where % len(answer)] ^= 1
    with pytest.raises(AuthenticationError):
        _feed_in_steps(listener, bytes(answer))
    assert listener.hello is None


def test_a_verdict_that_was_changed_on_its_way() -> None:
    for where in (0, 32, 40, 50):
        dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
        _feed_in_steps(listener, dialler.answer(listener.feed(dialler.opening), HELLO))
        raw = bytearray(listener.welcome(WELCOME))
        raw[where] ^= 1
        code, _ = dialler.verdict_length(bytes(raw[: dialler.verdict_header_bytes]))
        with pytest.raises(AuthenticationError, match="changed"):
            dialler.verdict(code, bytes(raw[dialler.verdict_header_bytes :]))


def test_another_certificate_in_between() -> None:
    """Both ends must have seen the same certificate, or somebody decrypts in the middle."""
    dialler, listener = DiallerHandshake(SECRET, b"of the relay"), ListenerHandshake(SECRET, b"of the listener")
    with pytest.raises(AuthenticationError, match="between"):
        dialler.answer(listener.feed(dialler.opening), HELLO)


@given(st.binary(min_size=1, max_size=100))
@example(b"\x97\x01\xa2\xff\xfe\x01\x01\x01\xc3\xa1a")  # a name that is not UTF-8
def test_any_hello_is_taken_or_refused(body: bytes) -> None:
    dialler, listener = _Verbose(SECRET), ListenerHandshake(SECRET)
    try:
        _feed_in_steps(listener, dialler.answer_with(listener.feed(dialler.opening), body))
    except ProtocolError:
        assert listener.hello is None
    else:
        assert listener.hello is not None


@given(st.binary(max_size=300))
def test_any_opening_is_taken_or_refused(raw: bytes) -> None:
    listener = ListenerHandshake(SECRET)
    try:
        _feed_in_steps(listener, raw)
    except TelegradError:
        pass
    assert listener.hello is None


def test_refusals_are_said_in_words() -> None:
    dialler, listener = DiallerHandshake(SECRET), ListenerHandshake(SECRET)
    _feed_in_steps(listener, dialler.answer(listener.feed(dialler.opening), HELLO))
    raw = listener.refusal(AuthenticationError("because"))
    code, _ = dialler.verdict_length(raw[: dialler.verdict_header_bytes])
    with pytest.raises(Refused, match="because"):
        dialler.verdict(code, raw[dialler.verdict_header_bytes :])
    with pytest.raises(ProtocolError, match="limit"):
        dialler.verdict_length(bytes(32) + b"\0\xff\xff\xff\xff")
