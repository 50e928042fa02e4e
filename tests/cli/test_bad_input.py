"""Bad input of all commands: one clear line on stderr, the right status, nothing changed, no trace, no hang."""

import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from tests.cli.test_help import PROGRAMS
from upr.cli import entry
from upr.cli.admin import main as admin
from upr_backup.cli.commands import main as backup
from upr_cli_kit.exit_codes import UNREACHABLE, exit_code_of
from upr_client import Client
from upr_protocol.wire.grpc import error_from_call

MANY_DIGITS = "9" * 5000
NO_TEXT = "\udcff"
"""What Python makes of an argument of the byte 255."""
HANG_SECONDS = 60.0

TABLE = """
2 | upr-server | Missing option '--data'
2 | upr-server --data '' | the path is empty
2 | upr-server --data folder --cluster '' --print-config | cluster is ''; must be etcd://HOST:PORT
2 | upr-server --data folder --ready-file '' --print-config | the path is empty; is a variable not set?
2 | upr-server --data folder --tokens '' --print-config | the path is empty; is a variable not set?
2 | upr-server --data folder extra --print-config | unexpected extra argument (extra)
2 | upr-server --data folder --listen nowhere --print-config | 'nowhere' is not HOST:PORT
2 | upr-server --data folder --listen :7711 --print-config | ':7711' is not HOST:PORT
2 | upr-server --data folder --listen 127.0.0.1:65536 --print-config | port is 65536, it must be from 0 to 65535
2 | upr-server --data folder --listen ::1:7711 --print-config | '::1:7711' is not HOST:PORT
2 | upr-server --data folder --http 1:2:3 --print-config | '1:2:3' is not HOST:PORT
2 | upr-server --data folder --text nobody --print-config | 'nobody' is not HOST:PORT
2 | upr-server --data folder --advertise x --print-config | 'x' is not HOST:PORT
2 | upr-server --data folder --replicate-from a,b --print-config | 'a' is not HOST:PORT
2 | upr-server --data folder --tail-bytes=-1 --print-config | '-1' must be a size of
2 | upr-server --data folder --tail-bytes lots --print-config | 'lots' must be a size of
2 | upr-server --data folder --tail-bytes 99999999TiB --print-config | must be a size of
2 | upr-server --data folder --max-value-bytes 1GiB --print-config | '1GiB' must be a size of 0 to 20MiB
2 | upr-server --data folder --heartbeat-seconds 0 --print-config | must be a duration of
2 | upr-server --data folder --flush-seconds never --print-config | 'never' must be a duration of
2 | upr-server --data folder --flush-seconds 0 --print-config | must be a duration of
2 | upr-server --data folder --reader-timeout 1 --print-config | with its unit
2 | upr-server --data folder --failover-log 1 --print-config | Did you mean '--failover-log-records'?
2 | upr-server --data folder --log-format xml --print-config | 'xml' is not one of 'text', 'json'
2 | upr-server --data folder --no-such --print-config | No such option '--no-such'
2 | upr-server --data folder --config none.toml --print-config | 'none.toml' does not exist
2 | upr-server --data folder --config bad.toml --print-config | bad.toml cannot be read: Invalid value (at line 1
2 | upr-server --data folder --config odd.toml --print-config | the setting no-such is unknown
2 | upr-server --data folder --config kind.toml --print-config | insecure is 'yes'; must be true or false
2 | upr-server --data text | the data directory text cannot be used
2 | upr-server --data folder --listen 0.0.0.0:0 | must be loopback without TLS and identities
2 | upr-server --data folder --listen 127.0.0.1:0 --http 0.0.0.0:0 | --http is 0.0.0.0:0; must be loopback without --insecure (give --insecure to serve there
2 | upr-server --data folder --tls-cert none.pem --listen 127.0.0.1:0 | must be a certificate with its key
2 | upr-server --data folder --tokens text --listen 127.0.0.1:0 | file of identities text, line 1: no JSON object
2 | upr-server --data folder --tokens none --listen 127.0.0.1:0 | the file of identities cannot be used
2 | upr-admin stauts | No such command 'stauts'. Did you mean 'status'?
2 | upr-admin --no-such | No such option '--no-such'
2 | upr-admin status extra | Got unexpected extra argument (extra)
2 | upr-admin status --target nowhere | 'nowhere' is not HOST:PORT
2 | upr-admin status --target :1 | ':1' is not HOST:PORT
2 | upr-admin status --target 127.0.0.1:99999 | port is 99999, it must be from 0 to 65535
2 | upr-admin status --target a:1,b | 'b' is not HOST:PORT
2 | upr-admin status --data '' | the path is empty; is a variable not set?
5 | upr-admin status --data folder | there is no admin socket
2 | upr-admin status --data folder --target 127.0.0.1:1 | --data goes without --target and --context
3 | upr-admin status --context none | there is no context 'none' ('upr-admin context list' shows them)
2 | upr-admin status --tls-cert none --tls | one of certificate and key is missing; must be both or none (the certi
2 | upr-admin status --tls-ca text --target 127.0.0.1:1 | the authority's certificate in text is not in PEM; must have a line -----BEGIN CERTIFICATE----- (is
2 | upr-admin status --tls-cert text --tls-key text --target 127.0.0.1:1 | the certificate in text is not in PEM; must have
2 | upr-admin status --token-file none --target 127.0.0.1:1 | the file of the token cannot be read: No such file or directory (is
2 | upr-admin status --token-file '' | the path is empty; is a variable not set?
2 | upr-admin status --watch 0 | '0' must be a duration of 100ms to 1h
2 | upr-admin status --watch soon | 'soon' must be a duration of 100ms to 1h
2 | upr-admin top --every 0 | '0' must be a duration of 100ms to 1h
2 | upr-admin top --every 2h | '2h' must be a duration of 100ms to 1h
2 | upr-admin top | stdout is no terminal that top could draw on; 'upr-admin status --watc
2 | upr-admin partitions 1024 | partition is 1024, it must be from 0 to 1023
2 | upr-admin partitions 5-3 | the range 5-3 ends before it begins
2 | upr-admin partitions a | 'a' is not a partition or a range of partitions
2 | upr-admin partitions 1,,2 | '' is not a partition or a range of partitions
2 | upr-admin failover-log -- -1 | '-1' is not a partition or a range of partitions
2 | upr-admin explain | Missing argument 'PARTITION'
2 | upr-admin explain 1024 | 1024 is not in the range 0<=x<=1023
2 | upr-admin explain 5 --id zz | failover id is 'zz'; must be 1 to 16 hex digits
2 | upr-admin explain 5 --id 0 | failover id is 0; must be 1
2 | upr-admin explain 5 --id 1 --seqno 9 --horizon 8 | horizon is 8
2 | upr-admin explain 5 --id 1 --seqno 9 --markers 8,7 | marker 7 follows 8
2 | upr-admin explain 5 --id 1 --seqno 9 --markers 10 | markers is 10
2 | upr-admin explain 5 --seqno x | seqno is 'x', it must be an integer
2 | upr-admin explain 5 --seqno -1 | seqno is -1; must be 0 to 281474976710655
2 | upr-admin explain 5 --seqno 281474976710656 | seqno is 281474976710656; must be 0 to 281474976710655
2 | upr-admin explain 5 --markers 3,x | seqno is 'x', it must be an integer
2 | upr-admin explain 5 --high 5 | --high goes with --log; a server is asked for its own
2 | upr-admin explain 5 --log none | File 'none' does not exist
2 | upr-admin explain 5 --log text | text is not what 'upr-admin failover-log --json' prints: not JSON (E
2 | upr-admin explain 5 --log folder | File 'folder' is a directory
2 | upr-admin bucket rm default | No such command 'rm'. Did you mean 'drop'?
2 | upr-admin bucket lsit | No such command 'lsit'. Did you mean 'list'?
2 | upr-admin bucket create | Missing argument 'NAME'
2 | upr-admin bucket create '' | bucket '' is 0 bytes; must be 1 to 200 without control characters
2 | upr-admin bucket create a --quota lots | 'lots' must be a size of 0 to 1048576TiB
2 | upr-admin bucket create a --compression lzma | 'lzma' is not one of 'none', 'zstd'
2 | upr-admin bucket quota a | Missing argument 'SIZE'
2 | upr-admin bucket quota a big | 'big' must be a size of 0 to 1048576TiB
2 | upr-admin bucket drop a --version xyz --yes | 'xyz' is not 16 hex digits
2 | upr-admin cut create | Missing argument 'NAME'
2 | upr-admin cut create a --lease 31d | '31d' must be a duration of 1ms to 30d
2 | upr-admin cut create a --lease soon | 'soon' must be a duration of 1ms to 30d
2 | upr-admin cut create a --partitions 9999 | partition is 9999, it must be from 0 to 1023
2 | upr-admin cut renew | Missing argument 'NAME'
2 | upr-admin cut release '' | cut '' is 0 bytes; must be 1 to 200 without control characters
2 | upr-admin consumers show | Missing argument 'NAME'
2 | upr-admin consumers reset a | Missing option '--to'
2 | upr-admin consumers reset a --to yesterday | 'yesterday' is no time
2 | upr-admin consumers reset a --to 2026-05-01T12:00:00 | '2026-05-01T12:00:00' says no offset from UTC
2 | upr-admin consumers reset a --to '5 ago' | '5 ago' is no time
2 | upr-admin consumers --bucket b forget a | --bucket goes behind 'forget'
2 | upr-admin consumers forget | Missing argument 'NAME'
2 | upr-admin context add | Missing argument 'NAME'
2 | upr-admin context add a | Missing option '--target'
2 | upr-admin context add a --target nowhere | 'nowhere' is not HOST:PORT
3 | upr-admin context use none | there is no context 'none' ('upr-admin context list' shows them)
3 | upr-admin context remove none | there is no context 'none' ('upr-admin context list' shows them)
2 | upr-admin token add a --role read | Missing option '--tokens' (env var: 'UPR_SERVER_TOKENS')
2 | upr-admin token add a --tokens t | Missing option '--role'
2 | upr-admin token add a --role king --tokens t | 'king' is not one of read, write, replicate, admin
2 | upr-admin token add a --role read: --tokens t | 'read:' names no bucket
2 | upr-admin token add a --role read:b\x7f --tokens t | bucket 'b\\x7f' is 2 bytes; must be 1 to 200 without control characters
2 | upr-admin token add a --role replicate:b --tokens t | file of identities, line 1: replicate of 'a' is for some buckets; must be true
2 | upr-admin token add '' --role read --tokens t | identity '' is 0 bytes; must be 1 to 200 without control characters
2 | upr-admin token add a --role read --certificate c --out o --tokens t | --out is for a token, and with --certificate there is none
2 | upr-admin token add a --role read --tokens none/t | none: No such file or directory
2 | upr-admin token list --tokens none | none: No such file or directory
2 | upr-admin token list --tokens text | file of identities text, line 1: no JSON object ('upr-admin token add' an
2 | upr-admin token add a --role read --tokens text | /text, line 1: no JSON object
2 | upr-admin status --token-file /dev/null | the token in /dev/null is empty; must be one or more
2 | upr-admin token list --tokens folder | File 'folder' is a directory
2 | upr-admin token revoke a --tokens none | none: No such file or directory
2 | upr-admin purge 1024 | partition is 1024, it must be from 0 to 1023
2 | upr-admin check | Missing argument 'DIR'
2 | upr-admin check '' | the path is empty; is a variable not set?
2 | upr-admin check none | none is not a data directory: upr-stream.json is not there
2 | upr-admin check text | text is not a data directory: upr-stream.json is not there
2 | upr-admin check folder | folder is not a data directory: upr-stream.json is not there
2 | upr-admin check folder --partitions 1- | '1-' is not a partition or a range of partitions
2 | upr-admin restore-copy none --yes | none is not a data directory: upr-stream.json is not there
2 | upr-admin restore-copy folder --yes | folder is not a data directory: upr-stream.json is not there
2 | upr-admin restore-copy folder | folder is not a data directory: upr-stream.json is not there
2 | upr-admin accept-loss folder | Missing argument 'PARTITION ...'
2 | upr-admin accept-loss '' 5 --yes | the path is empty; is a variable not set?
2 | upr-admin accept-loss none 5 --yes | none is not a data directory: upr-stream.json is not there
2 | upr-admin accept-loss folder 5 --yes | folder is not a data directory: upr-stream.json is not there
2 | upr-admin undone apply none --if-unchanged | File 'none' does not exist
2 | upr-admin undone apply text | Missing option '--if-unchanged'
2 | upr-admin promote --timeout 0 | '0' must be a duration of 100ms to 36500d
2 | upr-admin promote --force | nobody can be asked here: give --yes to promote the server
2 | upr-admin takeover | Missing option '--to'
2 | upr-admin takeover --to a | 'a' is not HOST:PORT
2 | upr-admin topology forget | Missing argument 'SERVER'
2 | upr-cat del key | No such command 'del'. Did you mean 'delete'?
2 | upr-cat flow | No such command 'flow'. Did you mean 'follow'?
2 | upr-cat get | Missing argument 'KEY'
2 | upr-cat get a b | Got unexpected extra argument (b)
2 | upr-cat get '' | key is 0 bytes; must be 1 to 4096
2 | upr-cat get a --target nowhere | 'nowhere' is not HOST:PORT
2 | upr-cat set a | Missing argument 'VALUE'
2 | upr-cat set a b --durability never | 'never' is not one of 'disk', 'memory', 'replicated(1)', 'replicated(2
2 | upr-cat delete | Missing argument 'KEY'
2 | upr-cat dump --partitions 1024 | partition is 1024, it must be from 0 to 1023
2 | upr-cat follow -n 0 | 0 is not in the range x>=1
2 | upr-cat follow -n many | 'many' is not a valid integer range
2 | upr-cat follow --from-time soon | 'soon' is no time
2 | upr-cat follow --from-time 2026-05-01T12:00:00 | '2026-05-01T12:00:00' says no offset from UTC
2 | upr-cat follow -f '%z' | '%z' in the format is not known (known are %p, %s, %o, %k, %v, %%)
2 | upr-cat follow --stability never | 'never' is not one of 'disk', 'memory', 'replicated(1)', 'replicated(2
2 | upr-cat follow --partitions 5-3 | the range 5-3 ends before it begins
2 | upr-cat follow --retry-seconds x | 'x' must be a duration of 0s to 36500d
2 | upr-cat follow --position '' | the path is empty; is a variable not set?
2 | upr-cat follow --position folder | File 'folder' is a directory
2 | upr-cat follow --from-now --from-start | are given together
2 | upr-cat follow --from-now --from-time '1h ago' | are given together
2 | upr-cat follow -f json | format is 'json'; must be jsonl, csv, raw, or have a %
2 | upr-cat follow -f raw --keys-only | -f raw prints values
2 | upr-cat follow --group g --from-start | go without --group
2 | upr-cat follow --group g --position p | go without --group
2 | upr-cat follow --group g --until-now | --until-now goes without --group
2 | upr-cat follow --group '' | group '' is 0 bytes
2 | upr-cat follow --group g --member '' | member '' is 0 bytes
2 | upr-cat follow --member m | --member goes with --group
2 | upr-cat bench --rows 0 | 0 is not in the range
2 | upr-cat load xml | No such command 'xml'
2 | upr-cat load jsonl | Missing argument 'FILE'
2 | upr-cat load jsonl '' | the path is empty; is a variable not set?
2 | upr-cat load parquet '' | the path is empty; is a variable not set?
2 | upr-cat load jsonl folder | File 'folder' is a directory
2 | upr-cat load git | Missing argument 'REPO'
2 | upr-cat load git '' | the path is empty; is a variable not set?
2 | upr-cat load git none | none is not a directory
2 | upr-backup list | REPOSITORY goes before 'list': upr-backup REPOSITORY list
2 | upr-backup backup --full | REPOSITORY goes before 'backup': upr-backup REPOSITORY backup
2 | upr-backup repo | Missing command
2 | upr-backup repo snapshots | No such command 'snapshots'. Did you mean 'list'?
2 | upr-backup repo lsit | No such command 'lsit'. Did you mean 'list'?
2 | upr-backup '' list | the location is empty (a folder, file:///FOLDER, s3://BUCKET/PREFIX, g
2 | upr-backup ftp://a/b list | ftp:// is no known kind of location (a folder, file:///FOLDER, s3://BU
2 | upr-backup s3:/a list | s3: is followed by one slash (a folder, file:///FOLDER, s3://BUCKET/PR
2 | upr-backup file://host/a list | a file:// URL has three slashes and the folder's whole path: 'file://h
2 | upr-backup none list | there is no repository here
2 | upr-backup folder list | there is no repository here
2 | upr-backup text list | there is no repository here
2 | upr-backup repo init --target nowhere | 'nowhere' is not HOST:PORT
2 | upr-backup repo backup --full --every 5m | --full and --every do not go together: each turn would read everything
2 | upr-backup repo backup --processes 0 | 0 is not in the range 1<=x<=64
2 | upr-backup repo backup --engine local --master x | --master and --conf are of Spark: add --engine spark
2 | upr-backup repo backup --engine spark --processes 2 | --processes is of the engine local; Spark takes --master local[N]
2 | upr-backup repo backup --conf x | 'x' is not spark.NAME=VALUE
2 | upr-backup repo backup --engine flink | 'flink' is not one of
2 | upr-backup repo backup --every 0 | '0' must be a duration of 1s to 36500d
2 | upr-backup repo backup --group-seqnos 0 | 0 is not in the range x>=1
2 | upr-backup none backup | there is no repository here
2 | upr-backup none info | there is no repository here
2 | upr-backup none info 0 | 0 is not in the range x>=1
2 | upr-backup none verify | there is no repository here
2 | upr-backup none restore --target 127.0.0.1:1 | there is no repository here
2 | upr-backup none restore --target 127.0.0.1:1 --at tomorrow | 'tomorrow' is neither a backup's number nor a time with its offset fro
2 | upr-backup none restore --target 127.0.0.1:1 --partitions 5-3 | the range 5-3 ends before it begins
2 | upr-backup none export --to out | Missing option '--format'. Choose from: parquet, delta
2 | upr-backup none export --format parquet | Missing option '--to'
2 | upr-backup none export --to out --format csv | 'csv' is not one of 'parquet', 'delta'
2 | upr-backup none export --to out --format parquet --overwrite | --overwrite is for --format delta; give a place that is empty
2 | upr-backup none export --to out --format parquet | there is no repository here
2 | upr-backup none merge --to 0 | 0 is not in the range x>=1
2 | upr-backup none merge --to 5 --keep-last 3 | --to does not go together with an option --keep-
2 | upr-backup none merge | there is no repository here
2 | upr-backup none expire | say what stays: --keep-last N, --keep-within 30d or --keep-daily N
2 | upr-backup none expire --keep-last 0 | 0 is not in the range x>=1
2 | upr-backup none expire --keep-within 30 | '30' must be a duration of 0s to 36500d, with its unit
2 | upr-backup none expire --keep-last 1 | there is no repository here
2 | upr-backup none prune | there is no repository here
2 | upr-backup none prune --grace never | 'never' must be a duration of 0s to 36500d
3 | upr-admin storage --bucket none | 'none'
3 | upr-admin consumers --bucket none | 'none'
3 | upr-admin partitions --bucket none | 'none'
3 | upr-admin bucket drop none --yes | 'none'
4 | upr-admin bucket create default | bucket 'default' exists
4 | upr-admin cut create now | there is a cut 'now' already
3 | upr-admin cut release none | there is no cut 'none'
3 | upr-admin cut renew none | there is no cut 'none'
3 | upr-admin consumers show none | there is no consumer 'none'
3 | upr-admin consumers reset none --to now --yes | 'none'
2 | upr-admin consumers reset none --to now | give --yes to reset the positions
4 | upr-admin token add a --role read --tokens tokens | there is an identity 'a' already
3 | upr-admin token revoke none --tokens tokens | there is no identity 'none'
4 | upr-admin token add b --role read --tokens tokens --out text | File exists
2 | upr-admin bucket drop default | give --yes to drop the bucket
2 | upr-admin bucket --json drop default | --json goes behind 'drop'
2 | upr-admin consumers --target 127.0.0.1:1 forget a | --target goes behind 'forget'
2 | upr-admin consumers --partitions forget a | --partitions goes behind 'forget'
2 | upr-admin undone list none | none is not a data directory
2 | upr-admin undone list text | text is not a data directory
1 | upr-admin undone apply text --if-unchanged | text: line 1 cannot be read
5 | upr-admin status --target nohost.invalid:7711 | nohost.invalid:7711: the name of the host is not known
5 | upr-admin status --target 127.0.0.1:1 | 127.0.0.1:1: nothing listens there
3 | upr-cat get none | there is no key 'none'
2 | upr-cat set '' b | key is 0 bytes
3 | upr-cat get key --bucket none | 'none'
3 | upr-cat follow --until-now --bucket none | 'none'
3 | upr-cat dump --bucket none | 'none'
3 | upr-cat delete key --bucket none | 'none'
3 | upr-cat bench --bucket none | 'none'
5 | upr-cat follow --target 127.0.0.1:1 | nothing listens there
5 | upr-cat load jsonl /dev/null --target 127.0.0.1:1 | nothing listens there
2 | upr-cat load csv text | text:1: the column "key" is there 0 times
2 | upr-cat load parquet text | text: not Parquet
2 | upr-cat load jsonl text | line 1
2 | upr-cat load jsonl none | none: No such file or directory
4 | upr-backup repo init | already
3 | upr-backup other init --bucket none | there is no bucket 'none'
2 | upr-backup restore repo | REPOSITORY goes before 'restore'
3 | upr-backup repo info 7 | 7
3 | upr-backup repo restore --at 7 | 7
5 | upr-backup other init --target 127.0.0.1:1 | is the server running
"""
"""Of each line the status, the command line, and words of the error. There are a bucket "default" with a row, a cut "now",
the files text and tokens, the folders folder and data, a repository repo, and nobody at 127.0.0.1:1."""


def cases() -> list[tuple[int, str, str]]:
    lines = [line for line in TABLE.splitlines() if line]
    found = [line.split(" | ") for line in lines]
    return [(int(status), words, expected) for status, words, expected in found]


def state(client: Client, folder: Path) -> tuple[Any, ...]:
    """Return what commands could have changed."""
    files = {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if "lock" not in path.name
    }
    buckets = client.admin.buckets()
    high = [info.high_seqno for info in client.admin.partitions("default")]
    cuts = [cut.name for cut in client.admin.cuts("default")]
    return files, [(one.name, one.version, one.quota_bytes) for one in buckets], high, cuts


def make(client: Client, target: str, folder: Path) -> None:
    """Make what the table speaks of."""
    for name, content in {
        "text": "no JSON\n",
        "bad.toml": "tail-bytes = \n",
        "odd.toml": "no-such = 1\n",
        "kind.toml": 'insecure = "yes"\n',
    }.items():
        (folder / name).write_text(content)
    (folder / "folder").mkdir()
    client.bucket().set(b"key", b"value")
    client.admin.create_cut("default", "now")
    run = CliRunner().invoke
    tokens = str(folder / "tokens")
    assert run(admin, ["token", "add", "a", "--role", "read", "--tokens", tokens]).exit_code == 0
    assert run(backup, [str(folder / "repo"), "init", "--target", target]).exit_code == 0


def complaint(words: str, status: int, expected: str) -> str:
    """Run a command line, and return what is wrong with what it did; empty for nothing."""
    program, *arguments = shlex.split(words)
    began = time.monotonic()
    done = CliRunner().invoke(PROGRAMS[program], arguments, prog_name=program)
    wrong = []
    if done.exit_code != status:
        wrong.append(f"status {done.exit_code}")
    if expected not in done.stderr or done.stderr.count("\n") != 1:
        wrong.append(f"stderr {done.stderr!r}")
    if not done.stderr.startswith("error: ") or len(done.stderr) > 600:
        wrong.append("no clear line")
    if done.stdout:
        wrong.append(f"stdout {done.stdout[:100]!r}")
    if time.monotonic() - began > HANG_SECONDS:
        wrong.append("it hung")
    return f"{words}: {', '.join(wrong)}" if wrong else ""


def test_bad_input_is_one_clear_line_and_changes_nothing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cases()
    assert len(table) >= 150
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPR_TARGET", target)
    monkeypatch.setenv("UPR_CONTEXTS", str(tmp_path / "contexts.json"))
    with Client(target) as client:
        make(client, target, tmp_path)
        before = state(client, tmp_path)
        wrong: list[str] = []
        for status, words, expected in table:
            wrong += filter(None, [complaint(words, status, expected)])
        assert not wrong, "\n".join(wrong)
        assert state(client, tmp_path) == before


def test_what_a_shell_cannot_type_is_one_line_too(target: str) -> None:
    there = ("--target", target)
    for arguments, words in (
        (("bucket", "create", NO_TEXT), "is not UTF-8"),
        (("bucket", "drop", "--yes", NO_TEXT), "is not UTF-8"),
        (("partitions", "--bucket", NO_TEXT), "is not UTF-8"),
        (("storage", "--bucket", NO_TEXT), "is not UTF-8"),
        (("consumers", "forget", NO_TEXT), "is not UTF-8"),
        (("cut", "create", NO_TEXT), "is not UTF-8"),
        (("cut", "renew", NO_TEXT), "is not UTF-8"),
        (("cut", "release", NO_TEXT), "is not UTF-8"),
        (("partitions", MANY_DIGITS), "partition is 99999999999999999999..., it must be from 0"),
        (("cut", "create", "a", "--partitions", f"0-{MANY_DIGITS}"), "partition is 99999999999"),
        (("status", "--target", f"127.0.0.1:{MANY_DIGITS}"), "port is 99999999999999999999..."),
    ):
        done = CliRunner().invoke(
            admin, [*arguments, *(there if "status" not in arguments else ())]
        )
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert words in done.stderr
        assert len(done.stderr) < 300


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "ipv4:1.2.3.4:80: Trying to connect an http1.x server",
            "1.2.3.4:80: what listens there is no",
        ),
        ("Received http2 header with status: 404", "what listens there is no upr-server"),
        ("ipv4:1.2.3.4:80: Socket closed", "1.2.3.4:80: what listens there closes the connection"),
        ("ipv6:%5B::1%5D:80: connect: Connection refused (111)", "[::1]:80: nothing listens there"),
        ("unix:/s: connect failed: error: No such file or directory", "/s: nothing listens there"),
        (
            "ipv4:1.2.3.4:80: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "1.2.3.4:80: its certificate has expired",
        ),
        (
            "ipv4:1.2.3.4:80: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK",
            "1.2.3.4:80: its certificate is not valid yet",
        ),
    ],
)
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED])
def test_who_is_no_server_is_told_apart(code: grpc.StatusCode, details: str, words: str) -> None:
    failed: Any = SimpleNamespace(code=lambda: code, details=lambda: f"last error: {details}")
    error = error_from_call(failed)
    assert str(error).startswith(words)
    assert exit_code_of(error) == UNREACHABLE


def test_a_call_that_the_server_cancelled_says_what_to_do() -> None:
    code = grpc.StatusCode.CANCELLED
    failed: Any = SimpleNamespace(code=lambda: code, details=lambda: "CANCELLED")
    assert "too many calls at once: try again" in error_from_call(failed).hint


def test_what_the_server_needs_to_compress_is_missed_by_name() -> None:
    assert "zstandard" in entry.EXTRAS["server"][1]
