"""Starts the two parties, `hospital.py` and `company.py`, as programs of their own, and shows what crossed.

    python examples/hospital/run.py                    # both on this machine, over loopback
    sudo python examples/hospital/run.py --namespaces  # each in a network namespace of its own, joined by a cable
    python examples/hospital/run.py --clip 1 --noise 0.1

The keys are made here for the sake of the example. Two real parties would each make their own, have them signed by an
authority that both trust, and exchange the job's secret once.
"""

import argparse
import collections
import contextlib
import datetime
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ADDRESSES = {"hospital": "10.213.7.1", "company": "10.213.7.2"}


def make_keys(folder: Path) -> None:
    """An authority, a certificate for each party, and a secret that both know."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        sys.exit("this example makes keys with the package cryptography: pip install '.[tls]' in the clone")

    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    issuer_key = ec.generate_private_key(ec.SECP256R1())
    for name in ("authority", "hospital", "company"):
        key = issuer_key if name == "authority" else ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
            .sign(issuer_key, hashes.SHA256())
        )
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
        (folder / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / "job-secret").write_text(secrets.token_hex(32))


@contextlib.contextmanager
def namespaces() -> Iterator[dict[str, list[str]]]:
    """Two network namespaces with one cable between them; what to put before a command of each party."""
    mark = secrets.token_hex(3)
    names = {who: f"tg-{who}-{mark}" for who in ADDRESSES}
    ends = {who: f"tg{who[0]}{mark}" for who in ADDRESSES}
    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("link", "add", ends["hospital"], "type", "veth", "peer", "name", ends["company"])
        for who, name in names.items():
            ip("link", "set", ends[who], "netns", name)
            ip("-n", name, "addr", "add", f"{ADDRESSES[who]}/24", "dev", ends[who])
            ip("-n", name, "link", "set", ends[who], "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield {who: ["ip", "netns", "exec", name] for who, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def show(audit: Path) -> None:
    """What one party recorded, in short."""
    counts: collections.Counter[str] = collections.Counter()
    for line in audit.read_text().splitlines():
        record = json.loads(line)
        shapes = ", ".join(f"{t['dtype']} x {len(t['shape'])}d" for t in record.get("tensors", ()))
        counts[f"{record['direction']:3} {record['what']:9} {record.get('function', '')} {shapes}"] += 1
    print(f"{audit.stem} recorded:")
    for what, count in sorted(counts.items()):
        print(f"  {count:5} x {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each party; needs root")
    parser.add_argument("--steps", default="80")
    parser.add_argument("--clip", default="0")
    parser.add_argument("--noise", default="0")
    parser.add_argument("--gradient-noise", default="0")
    parser.add_argument("--output", default="examples-output", help="folder of the plot")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_keys(folder)
        before: dict[str, list[str]] = {"hospital": [], "company": []}
        hosts = dict.fromkeys(ADDRESSES, "127.0.0.1")
        if options.namespaces:
            before, hosts = stack.enter_context(namespaces()), ADDRESSES
        meet = f"tcp://{hosts['hospital']}:{29500 if options.namespaces else free_port()}"
        started = []
        for who, host in hosts.items():
            command = [*before[who], sys.executable, str(HERE / f"{who}.py"), "--meet", meet, "--host", host]
            command += ["--keys", str(folder), "--audit", str(folder / f"{who}.audit")]
            command += ["--steps", options.steps, "--clip", options.clip, "--noise", options.noise]
            command += ["--gradient-noise", options.gradient_noise, "--output", options.output]
            started.append(subprocess.Popen(command))
        try:
            status = max(process.wait(timeout=300) for process in started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if status:
            sys.exit(status)
        for who in hosts:
            show(folder / f"{who}.audit")


if __name__ == "__main__":
    main()
