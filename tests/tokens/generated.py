"""The seeded half of the corpus: machine text of the kinds that agents read and write.

Everything here is made up; the same seed gives the same texts on every machine.
"""

import base64
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

PER_CLASS: Final = 24

_NAMES: Final = [
    "ana",
    "boris",
    "chen",
    "dmitri",
    "elena",
    "farid",
    "greta",
    "hugo",
    "ines",
    "jonas",
    "kofi",
    "lena",
]
_PLACES: Final = [
    "Oslo",
    "Lima",
    "Porto",
    "Kyoto",
    "Dakar",
    "Graz",
    "Quito",
    "Turin",
    "Leeds",
    "Hanoi",
]
_THINGS: Final = [
    "session",
    "message",
    "store",
    "record",
    "batch",
    "window",
    "budget",
    "token",
    "note",
    "memory",
    "catalog",
    "index",
    "cursor",
    "request",
    "response",
    "timeout",
    "retry",
    "queue",
    "worker",
    "lease",
    "fence",
    "archive",
    "checkpoint",
    "summary",
]
_VERBS: Final = [
    "opened",
    "closed",
    "read",
    "wrote",
    "synced",
    "renamed",
    "skipped",
    "replayed",
    "merged",
    "dropped",
]


def texts() -> Iterator[tuple[str, str]]:
    """Class and text, in a fixed order."""
    kinds: dict[str, list[Callable[[Random], str]]] = {
        "json": [_rows, _tool_result, _config, _search_hits, _deep, _numbers],
        "logs": [_service_log, _access_log, _traceback, _test_run, _json_log, _system_log],
        "hex": [_uuids, _digests, _dump, _commits, _addresses, _colours],
        "base64": [_bytes, _picture, _wrapped, _web_token, _of_text, _keys],
        "minified": [_script, _style, _page, _script],
    }
    for kind, makers in kinds.items():
        for number in range(PER_CLASS):
            # Two neighbours share a maker, so that both halves of the split see every maker.
            make = makers[number // 2 % len(makers)]
            yield kind, make(Random(f"{kind} {number}"))


# --- JSON ------------------------------------------------------------------------------------


def _person(random: Random) -> dict[str, Any]:
    name = random.choice(_NAMES)
    return {
        "id": random.randrange(10**6),
        "name": name.title(),
        "email": f"{name}{random.randrange(100)}@example.org",
        "city": random.choice(_PLACES),
        "active": random.random() < 0.5,
        "score": round(random.uniform(0, 100), 2),
        "tags": random.sample(_THINGS, 3),
    }


def _rows(random: Random) -> str:
    return json.dumps([_person(random) for _ in range(8)], separators=(",", ":"))


def _tool_result(random: Random) -> str:
    found = {
        "ok": True,
        "took_ms": random.randrange(5000),
        "weather": [
            {
                "place": random.choice(_PLACES),
                "time": _time(random),
                "temperature_c": round(random.uniform(-10, 35), 1),
                "wind": {"speed": random.randrange(90), "direction": random.choice("NESW")},
                "summary": random.choice(["light rain", "clear sky", "fog until noon", "snow"]),
            }
            for _ in range(6)
        ],
        "error": None,
    }
    return json.dumps(found)


def _config(random: Random) -> str:
    found = {
        thing: {
            "enabled": random.random() < 0.7,
            "max_items": random.randrange(1000),
            "path": f"/var/lib/{random.choice(_THINGS)}/{thing}.db",
            "labels": random.sample(_NAMES, 2),
        }
        for thing in random.sample(_THINGS, 7)
    }
    return json.dumps(found, indent=2)


def _search_hits(random: Random) -> str:
    hits = [
        {
            "title": _words(random, 5).capitalize(),
            "url": f"https://docs.example.com/{random.choice(_THINGS)}/{random.choice(_THINGS)}",
            "snippet": _words(random, 18) + " …",
            "rank": number,
        }
        for number in range(1, 6)
    ]
    return json.dumps({"query": _words(random, 3), "hits": hits}, ensure_ascii=False)


def _deep(random: Random) -> str:
    def node(depth: int) -> Any:
        if depth == 0:
            return random.choice([None, True, random.randrange(100), random.choice(_NAMES)])
        return {random.choice(_THINGS): node(depth - 1) for _ in range(3)}

    return json.dumps(node(3), indent=4)


def _numbers(random: Random) -> str:
    rows = [[round(random.gauss(0, 50), 4) for _ in range(5)] for _ in range(14)]
    return json.dumps({"columns": random.sample(_THINGS, 5), "rows": rows})


# --- logs ------------------------------------------------------------------------------------


def _time(random: Random) -> str:
    day, hour, rest = random.randrange(1, 29), random.randrange(24), random.randrange(3600)
    return f"2026-{random.randrange(1, 13):02}-{day:02}T{hour:02}:{rest // 60:02}:{rest % 60:02}"


def _service_log(random: Random) -> str:
    return "\n".join(
        f"{_time(random).replace('T', ' ')},{random.randrange(1000):03} "
        f"{random.choice(['INFO', 'INFO', 'DEBUG', 'WARNING', 'ERROR'])} "
        f"[{random.choice(_THINGS)}.{random.choice(_THINGS)}] {random.choice(_VERBS)} "
        f"{random.choice(_THINGS)} {random.randrange(10**5)} in {random.uniform(0, 900):.1f} ms"
        for _ in range(14)
    )


def _access_log(random: Random) -> str:
    return "\n".join(
        f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(256)} - - "
        f"[{random.randrange(1, 29):02}/Nov/2026:{random.randrange(24):02}:"
        f"{random.randrange(60):02}:{random.randrange(60):02} +0000] "
        f'"{random.choice(["GET", "POST", "PUT"])} /api/v1/{random.choice(_THINGS)}s/'
        f'{random.randrange(10**4)}?limit={random.randrange(100)} HTTP/1.1" '
        f"{random.choice([200, 200, 201, 304, 404, 500])} {random.randrange(10**5)}"
        for _ in range(10)
    )


def _traceback(random: Random) -> str:
    frames = "".join(
        f'  File "/srv/app/{random.choice(_THINGS)}/{random.choice(_THINGS)}.py", '
        f"line {random.randrange(900)}, in {random.choice(_VERBS)}_{random.choice(_THINGS)}\n"
        f"    return self.{random.choice(_THINGS)}.{random.choice(_VERBS)}"
        f"({random.choice(_THINGS)}_id, timeout={random.randrange(60)})\n"
        for _ in range(6)
    )
    wrong = (
        f"ValueError: {random.choice(_THINGS)} {random.randrange(999)} is not {_words(random, 3)}"
    )
    return f"Traceback (most recent call last):\n{frames}{wrong}"


def _test_run(random: Random) -> str:
    lines = [
        f"tests/unit/test_{random.choice(_THINGS)}.py::test_{_words(random, 4).replace(' ', '_')} "
        f"{random.choice(['PASSED', 'PASSED', 'PASSED', 'FAILED', 'SKIPPED'])} "
        f"[{number * 7:3}%]"
        for number in range(1, 13)
    ]
    return "\n".join([*lines, f"=== 2 failed, 10 passed in {random.uniform(1, 90):.2f}s ==="])


def _json_log(random: Random) -> str:
    return "\n".join(
        json.dumps(
            {
                "ts": _time(random) + "Z",
                "level": random.choice(["info", "warn", "error"]),
                "logger": random.choice(_THINGS),
                "msg": _words(random, 6),
                "pid": random.randrange(10**5),
            }
        )
        for _ in range(9)
    )


def _system_log(random: Random) -> str:
    return "\n".join(
        f"Nov {random.randrange(1, 29):2} {random.randrange(24):02}:{random.randrange(60):02}:"
        f"{random.randrange(60):02} host{random.randrange(9)} "
        f"{random.choice(['kernel', 'sshd', 'systemd', 'cron'])}[{random.randrange(32768)}]: "
        f"{random.choice(_VERBS)} {random.choice(_THINGS)} for user {random.choice(_NAMES)} "
        f"from 192.168.{random.randrange(256)}.{random.randrange(256)} "
        f"port {random.randrange(1024, 65536)}"
        for _ in range(11)
    )


# --- hex and UUIDs ---------------------------------------------------------------------------


def _hex(random: Random, length: int) -> str:
    return "".join(random.choice("0123456789abcdef") for _ in range(length))


def _uuid(random: Random) -> str:
    return "-".join(_hex(random, length) for length in (8, 4, 4, 4, 12))


def _uuids(random: Random) -> str:
    return "\n".join(_uuid(random) for _ in range(16))


def _digests(random: Random) -> str:
    return "\n".join(
        f"{_hex(random, 64)}  {random.choice(_THINGS)}-{random.randrange(99)}.tar.gz"
        for _ in range(8)
    )


def _dump(random: Random) -> str:
    return "\n".join(
        f"{16 * row:08x}  " + " ".join(_hex(random, 2) for _ in range(16)) for row in range(14)
    )


def _commits(random: Random) -> str:
    return "\n".join(f"{_hex(random, 40)} {_words(random, 5)}" for _ in range(10))


def _addresses(random: Random) -> str:
    return "\n".join(
        f"0x{_hex(random, 12).upper()} in {random.choice(_THINGS)} at 0x{_hex(random, 8)}"
        for _ in range(16)
    )


def _colours(random: Random) -> str:
    return json.dumps({_hex(random, 12): _hex(random, 32).upper() for _ in range(9)})


# --- base64 ----------------------------------------------------------------------------------


def _b64(random: Random, length: int) -> str:
    return base64.b64encode(random.randbytes(length)).decode()


def _bytes(random: Random) -> str:
    return _b64(random, 600)


def _picture(random: Random) -> str:
    head = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0").decode().rstrip("=")
    return f"data:image/png;base64,{head}{_b64(random, 580)}"


def _wrapped(random: Random) -> str:
    return base64.encodebytes(random.randbytes(560)).decode()


def _web_token(random: Random) -> str:
    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    claims = {"sub": _uuid(random), "name": random.choice(_NAMES), "exp": random.randrange(10**9)}
    return "Authorization: Bearer " + ".".join(
        [
            part(b'{"alg":"RS256","typ":"JWT"}'),
            part(json.dumps(claims).encode()),
            part(random.randbytes(256)),
        ]
    )


def _of_text(random: Random) -> str:
    return base64.b64encode(_words(random, 80).encode()).decode()


def _keys(random: Random) -> str:
    return "\n".join(f"{random.choice(_THINGS).upper()}_KEY={_b64(random, 33)}" for _ in range(12))


# --- minified code ---------------------------------------------------------------------------

_MEMBERS: Final = [
    "length",
    "push",
    "map",
    "filter",
    "forEach",
    "prototype",
    "call",
    "apply",
    "addEventListener",
    "querySelector",
    "style",
    "className",
    "value",
    "then",
    "catch",
    "toString",
    "indexOf",
    "slice",
    "concat",
    "parentNode",
    "appendChild",
]


def _script(random: Random) -> str:
    """JavaScript as a minifier leaves it: one line, names of one or two letters."""

    def name() -> str:
        return random.choice("abcdefghijklmnoprstuvwxy") + (
            random.choice("etnrio") if random.random() < 0.2 else ""
        )

    def value(depth: int) -> str:
        simple = [name(), name(), str(random.randrange(300)), f'"{random.choice(_THINGS)}"', "!0"]
        if depth == 0:
            return random.choice([*simple, "void 0", "null", "this"])
        inner = depth - 1
        return random.choice(
            [
                *simple,
                f"{name()}.{random.choice(_MEMBERS)}",
                f"{name()}.{random.choice(_MEMBERS)}({value(inner)})",
                f"{name()}({value(inner)},{value(inner)})",
                f"{value(inner)}?{value(inner)}:{value(inner)}",
                f"{value(inner)}{random.choice(['+', '===', '&&', '||', '>', '-'])}{value(inner)}",
                f"{name()}[{value(inner)}]",
                f"function({name()}){{return {value(inner)}}}",
                f"({name()},{name()})=>{value(inner)}",
                f"{{{random.choice(_THINGS)}:{value(inner)},{name()}:{value(inner)}}}",
            ]
        )

    def statement() -> str:
        return random.choice(
            [
                f"var {name()}={value(2)},{name()}={value(2)};",
                f"if({value(2)})return {value(1)};",
                f"for(let {name()}=0;{name()}<{value(1)};{name()}++){{{name()}={value(2)}}}",
                f"{name()}.{random.choice(_MEMBERS)}={value(2)},{value(1)};",
                f"function {name()}({name()},{name()}){{return {value(3)}}}",
                f"const {name()}={value(3)};",
                f'throw new Error("{random.choice(_THINGS)} {random.choice(_VERBS)}");',
                f"{name()}&&({name()}={value(2)});",
            ]
        )

    return "!function(e,t){" + "".join(statement() for _ in range(22)) + "}(window,document);"


def _style(random: Random) -> str:
    def rule() -> str:
        name = f".{random.choice(_THINGS)}-{random.choice(_THINGS)}"
        sides = random.choice(["top", "left", "bottom", "right"])
        return (
            f"{name}{random.choice([':hover', '', '>a', ' li'])}{{display:"
            f"{random.choice(['flex', 'none', 'block'])};margin-{sides}:{random.randrange(40)}px;"
            f"color:#{_hex(random, 6)};padding:{random.randrange(3)}em .{random.randrange(9)}rem}}"
        )

    return "".join(rule() for _ in range(14))


def _page(random: Random) -> str:
    def row() -> str:
        return (
            f'<tr class="{random.choice(_THINGS)}"><td><a href="/{random.choice(_THINGS)}/'
            f'{random.randrange(999)}">{_words(random, 2)}</a></td>'
            f"<td>{random.randrange(9999)}</td></tr>"
        )

    return f"<table><tbody>{''.join(row() for _ in range(14))}</tbody></table>"


def _words(random: Random, number: int) -> str:
    return " ".join(random.choice([*_THINGS, *_VERBS, "the", "a", "of"]) for _ in range(number))
