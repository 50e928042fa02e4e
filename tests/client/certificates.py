"""A certificate of a server at 127.0.0.1, made by the command openssl."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest


@dataclass(frozen=True)
class Certificate:
    """A private key and the certificate that vouches for itself, in PEM."""

    key: bytes
    chain: bytes

    def credentials(self) -> grpc.ChannelCredentials:
        """What a client trusts this server by."""
        return grpc.ssl_channel_credentials(root_certificates=self.chain)


def make_certificate(folder: Path, name: str = "upr") -> Certificate:
    """Make a certificate of a common name; skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the command openssl, which makes the certificate, is not installed")
    key, chain = folder / "key.pem", folder / "chain.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    command += ["-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True)
    return Certificate(key.read_bytes(), chain.read_bytes())


def sign_anew(folder: Path, first: str, last: str) -> bytes:
    """Have the certificate in a folder be valid from one time to another one, as 20250101000000Z, and return it."""
    key, request, chain = (str(folder / name) for name in ("key.pem", "request.pem", "chain.pem"))
    conf = folder / "ca.conf"
    conf.write_text(
        f"[ca]\ndefault_ca=here\n[here]\ndatabase={folder}/database\nnew_certs_dir={folder}\n"
        f"serial={folder}/serial\n"
        "default_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n"
    )
    (folder / "database").touch()
    ask = ["req", "-new", "-key", key, "-subj", "/CN=upr", "-out", request]
    sign = ["ca", "-batch", "-selfsign", "-rand_serial", "-config", str(conf), "-notext"]
    sign += ["-keyfile", key, "-in", request, "-out", chain, "-startdate", first, "-enddate", last]
    for command in (ask, sign):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return Path(chain).read_bytes()
