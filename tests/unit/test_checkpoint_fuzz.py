"""Forty thousand damaged headers: one line or tensors that the library sees too, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MUTATIONS = 40_000
MEMORY_BYTES = 150_000_000
# In a process of its own, whose memory is limited: an allocation by a hostile number raises there.
FUZZ = r"""
import json, random, resource, signal, sys
from checkpoint.header import header_length, parse_header
from hostlib.errors import HostError
import safetensors
count, memory, seed = map(int, sys.argv[1:])
draw = random.Random(seed)
TOKENS = [b"[", b"]", b"{", b"}", b'"', b",", b":", b"0", b"-1", b"1e9", b"1e999", b"NaN", b"null",
          b"true", b"\0", b"\xff", b"\\ud800", b"18446744073709551616", b"9" * 5000,
          b"[" * 9000, b'{"a":' * 9000, b" " * 5000, b'"__metadata__":', b'"data_offsets":[0,1],',
          b'"shape":[4294967296,4294967296]', b'"dtype":"BF16",', b'"dtype":"F4",']
VALUES = [None, True, -1, 0, 1.0, 1e300, 2**62, 2**63, 2**70, 10**4000, "", "U8", "BF16", "F4", [],
          [0], [0, 0], [1] * 9, [2**62] * 8, [-2, -2], [[]], {}, {"a": "b"}, {"a": 1}, "x" * 5000]
NEAR = [0, 1, 2, 3, 4, 8]
SIZES = {"U8": 1, "BF16": 2, "F32": 4, "F8_E4M3": 1}

def good():
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for number in range(draw.randrange(6)):
        dtype = draw.choice(list(SIZES))
        shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
        size = SIZES[dtype]
        for extent in shape:
            size *= extent
        name = draw.choice(["a", "lm_head.weight", "model.layers.%d.x" % number]) + str(number)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    if draw.randrange(2):  # sound JSON that says something wrong, or something else that is right
        warp(header)
    text = json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(end))

def warp(header):
    name = draw.choice(list(header))
    if name == "__metadata__" or draw.randrange(6) == 0:
        header[name] = draw.choice(VALUES)
        return
    field = draw.choice(["dtype", "shape", "data_offsets", "more"])
    value = header[name].get(field)
    if isinstance(value, list) and value and draw.randrange(3):
        value[draw.randrange(len(value))] = draw.choice(VALUES + NEAR)
    elif draw.randrange(3):
        header[name][field] = draw.choice(VALUES)
    else:
        header[draw.choice(["", "x" * 600, "a\nb", "\ud800", "b"])] = header.pop(name)

def numbers(text):
    places = [n for n, byte in enumerate(text) if 48 <= byte < 58]
    return draw.choice(places) if places else 0

def mutate(content):
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(content) + 1)
        kind = draw.randrange(9)
        if kind == 0 and content:
            content[place % len(content)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place:place] = draw.choice(TOKENS)
        elif kind == 3:
            del content[place:place + draw.randrange(1, 30)]
        elif kind == 4:
            content[0:8] = draw.choice([draw.getrandbits(64), draw.randrange(3 * len(content) + 1),
                                        4 << 20, 100_000_000]).to_bytes(8, "little")
        elif kind == 5:
            other = draw.randrange(len(content) + 1)
            content[place:place] = content[min(place, other):max(place, other)]
        elif kind == 6:
            place = numbers(content)
            content[place:place + 1] = draw.choice(TOKENS)
        elif kind == 7:
            content += bytes(draw.randrange(1, 20))
    if draw.randrange(2):  # a header that fits, so that what is in it is looked at
        length = len(content) - 8 - draw.choice([0, 0, 1, 4, 12])
        if length > 0:
            content[0:8] = length.to_bytes(8, "little")
    return bytes(content)

resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
accepted = refused = 0
for _ in range(count):
    content = mutate(good())
    signal.setitimer(signal.ITIMER_VIRTUAL, 10)  # of the processor, for one header: a hang ends it
    try:
        length = header_length(content[:8], len(content), "file")
        tensors = parse_header(content[8:8 + length], len(content) - 8 - length, "file")
    except HostError as error:
        assert error.message.startswith("file: ") and len(error.message) < 2000, content
        assert error.message.isprintable(), content
        refused += 1
    else:
        seen = {name: (value["dtype"], tuple(value["shape"]))
                for name, value in safetensors.deserialize(content)}
        assert seen == {name: (t.dtype, t.shape) for name, t in tensors.items()}, content
        accepted += 1
print(json.dumps([accepted, refused]))
"""


def test_no_damaged_header_does_more_than_be_refused() -> None:
    packages = [REPOSITORY / "files/checkpoint", REPOSITORY / "files/hostlib"]
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(MUTATIONS), str(MEMORY_BYTES), "11"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    accepted, refused = json.loads(done.stdout)
    assert accepted + refused == MUTATIONS
    assert refused > MUTATIONS // 2
    assert accepted > MUTATIONS // 100, "the fuzz damages everything: it does not look deep"
