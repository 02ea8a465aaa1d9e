"""Tests that planted secrets are found, and that similar texts are unchanged."""

import json
import random
import string
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.redaction.redact import (
    RedactedText,
    cut_start,
    line_start,
    redact,
    redact_data,
    redact_ends,
    redact_text,
)
from support.strategies import texts

_chance = random.Random(4)


def _random(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Return `count` random characters, with each kind that the alphabet has."""
    return "a1"[: len(set(alphabet) & set("a1"))] + "".join(
        _chance.choices(alphabet, k=count - len(set(alphabet) & set("a1")))
    )


# Assembled here, so that scanners for secrets do not report this file.
_KEYS = {
    "openai": "sk-" + _random(48),
    "openai project": "sk-" + "proj-" + _random(40) + "_-" + _random(40),
    "openrouter": "sk-" + "or-v1-" + _random(64, "abcdef0123456789"),
    "anthropic": "sk-" + "ant-" + "api03-" + _random(40) + "-_" + _random(50),
    "google": "AI" + "za" + _random(35),
    "google client": "GOCS" + "PX-" + _random(28),
    "google oauth": "ya" + "29." + _random(60),
    "hugging face": "hf" + "_" + _random(34),
    "groq": "gs" + "k_" + _random(52),
    "xai": "xa" + "i-" + _random(80),
    "stripe": "sk" + "_live_" + _random(24),
    "stripe restricted": "rk" + "_test_" + _random(24),
    "stripe webhook": "wh" + "sec_" + _random(32),
    "sendgrid": "SG" + "." + _random(22) + "." + _random(43),
    "aws": "AK" + "IA" + _random(16, string.ascii_uppercase + "234567"),
    "aws session": "AS" + "IA" + _random(16, string.ascii_uppercase + "234567"),
    "github": "gh" + "p_" + _random(36),
    "github app": "gh" + "s_" + _random(36),
    "github fine": "github" + "_pat_" + _random(22) + "_" + _random(59),
    "gitlab": "gl" + "pat-" + _random(20),
    "slack": "xo" + "xb-123456789012-" + _random(24),
    "slack cookie": "xo" + "xd-" + _random(40),
    "slack app": "xa" + "pp-1-A0123-" + _random(40),
    "slack hook": "hooks.slack" + ".com/services/T0123/B0123/" + _random(24),
    "npm": "np" + "m_" + _random(36),
    "pypi": "py" + "pi-" + _random(60),
    "digital ocean": "dop" + "_v1_" + _random(64, "abcdef0123456789"),
    "gitlab runner": "gl" + "rt-" + _random(20),
    "gitlab deploy": "gl" + "dt-" + _random(20),
    "shopify": "shp" + "at_" + _random(32, "abcdef0123456789"),
    "databricks": "da" + "pi" + _random(32, "abcdef0123456789"),
    "vault": "hv" + "s." + _random(24),
    "atlassian": "ATATT" + "3x" + _random(60) + "=1A2B3C4D",
    "postman": "PM"
    + "AK-"
    + _random(24, "abcdef0123456789")
    + "-"
    + _random(34, "abcdef0123456789"),
    "notion": "nt" + "n_" + _random(46),
    "linear": "lin" + "_api_" + _random(40),
    "supabase": "sb" + "p_" + _random(40, "abcdef0123456789"),
    "doppler": "dp" + ".pt." + _random(43),
    "perplexity": "pp" + "lx-" + _random(48),
    "replicate": "r8" + "_" + _random(37),
    "docker": "dckr" + "_pat_" + _random(27),
    "rubygems": "ruby" + "gems_" + _random(48, "abcdef0123456789"),
    "sentry": "snt" + "rys_" + _random(80),
    "new relic": "NR" + "AK-" + _random(27, string.ascii_uppercase + "234567"),
    "discord bot": "MT" + _random(24) + "." + "Gx3" + _random(3) + "." + _random(38),
    "our cookie": "sten" + "o=1797000000." + _random(64, "abcdef0123456789"),
    "telegram": "123456789:" + _random(35),
    "jwt": "ey" + "J" + _random(30) + "." + "ey" + "J" + _random(40) + "." + _random(43),
}
_LINKS = {
    "discord hook": "discord.com/api/web" + "hooks/123456789012345678/" + _random(68),
    "teams hook": "x.webhook.office.com/web" + "hookb2/" + _random(36) + "@" + _random(36),
    "azure": "h.example/a?sv=1&si" + "g=" + _random(40) + "%3D",
    "our login": "http://127.0.0.1:8787/log" + "in?code=" + _random(43),
}
"""Addresses whose last part is secret."""
_PEM = f"-----BEGIN RSA PRIV{''}ATE KEY-----\nMIIEow+/{_random(60)}\n-----END RSA PRIVATE KEY-----"
_CARDS = ["4111 1111 1111 1111", "5555-5555-5555-4444", "378282246310005", "3782 822463 10005"]
_CARDS += ["4111.1111.1111.1111", "4111\u00a01111\u00a01111\u00a01111", "4111  1111  1111  1111"]
_CARDS += ["4111\u20131111\u20131111\u20131111", "3782\u202f822463\u202f10005"]
_CARDS += ["6011111111111117", "30569309025904", "3566002020360505", "2223003122003222"]


@pytest.mark.parametrize("name", _KEYS)
@pytest.mark.parametrize(
    "around", ["{}", "use {} please", "key={}", '"{}"', "({}).", "`{}`", "é{}"]
)
def test_planted_key_is_redacted(name: str, around: str) -> None:
    key = _KEYS[name]
    found = redact(around.format(key))
    assert found.count == 1
    assert key[8:] not in found.text
    assert "[redacted: " in found.text


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", _LINKS)
@pytest.mark.parametrize("around", ["{}", "open {} please", '"{}"', "({})."])
def test_secret_part_of_a_link_is_redacted(name: str, around: str) -> None:
    link = _LINKS[name]
    found = redact(around.format(link))
    assert found.count == 1
    assert link[-12:] not in found.text
    assert found.text.startswith(around.format(link)[:12])


@pytest.mark.quick(16)
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"my key:\n{_PEM}\nthanks", "my key:\n[redacted: private key]\nthanks"),
        (f"cut off {_PEM[:70]}", "cut off [redacted: private key]"),
        (f"two {_PEM}{_PEM}", "two [redacted: private key][redacted: private key]"),
        ("Authorization: Bearer abcDEF123_456-789.xyz", "Authorization: Bearer [redacted: token]"),
        ("Authorization: Basic Ym9iOmh1bnRlcjI=", "Authorization: Basic [redacted: password]"),
        ("postgres://bob:hunter2@db/x", "postgres://bob:[redacted: password]@db/x"),
        ("my password is hunter2", "my password is [redacted: password]"),
        ("My password is swordfish.", "My password is [redacted: password]."),
        (
            "my password is hunter2, my pin is 4821.",
            "my password is [redacted: password], my pin is [redacted: pin].",
        ),
        ("(password: hunter2) ok", "(password: [redacted: password]) ok"),
        ("password: hunter2!", "password: [redacted: password]"),
        ("mysql -u root -ptulip99 db", "mysql -u root -p[redacted: password] db"),
        ("mysqldump -p'a b' db", "mysqldump -p'[redacted: password]' db"),
        ("FERNET_KEY=" + "aB3d" * 10 + "aB=", "FERNET_KEY=[redacted: secret]"),
        ("secret_key_base: " + "0a1b" * 8, "secret_key_base: [redacted: secret]"),
        (
            f"Private-Lines: 2\n{'aB3/' * 16}\n{'xY+=' * 4}\nPrivate-MAC: 00",
            "Private-Lines: 2\n[redacted: private key]Private-MAC: 00",
        ),
        ("my password is swordfish and I", "my password is [redacted: password] and I"),
        ("password is now 'open sesame'", "password is now '[redacted: password]'"),
        (
            "the password for our wifi is tulip99",
            "the password for our wifi is [redacted: password]",
        ),
        ("I changed the password to hunter22", "I changed the password to [redacted: password]"),
        ("password: swordfish\nhost: x", "password: [redacted: password]\nhost: x"),
        ("DB_PASSWORD=$ecret&more", "DB_PASSWORD=[redacted: password]"),
        ("passwd := x7#p", "passwd := [redacted: password]"),
        (f"pwd={'x9' * 300} end", "pwd=[redacted: password] end"),
        ('{"password": "a b", "id": 1}', '{"password": "[redacted: password]", "id": 1}'),
        ("client_secret='f00ba4ba2'", "client_secret='[redacted: secret]'"),
        ("api key: 9f8e7d6c5b4a", "api key: [redacted: secret]"),
        ("AWS_SECRET_ACCESS_KEY=wJal4rXU/tnF+EMI", "AWS_SECRET_ACCESS_KEY=[redacted: secret]"),
        ("Passwort: geheim123", "Passwort: [redacted: secret]"),
        ("пароль: qwerty123", "пароль: [redacted: secret]"),
        ("my card pin is 4821, ok", "my card pin is [redacted: pin], ok"),
        ("in 2024 4111 1111 1111 1111 09/29", "in 2024 [redacted: card number] 09/29"),
        ("my PIN code: 4821!", "my PIN code: [redacted: pin]!"),
        ("PIN: 4821", "PIN: [redacted: pin]"),
        ("DOOR_PIN=4821", "DOOR_PIN=[redacted: pin]"),
        ('{"pin": "4821"}', '{"pin": "[redacted: pin]"}'),
        ("pin is: 4821", "pin is: [redacted: pin]"),
        ("my password is: hunter2", "my password is: [redacted: password]"),
        ("password\uff1ahunter2", "password\uff1a[redacted: password]"),
        ("passwort: hunter2", "passwort: [redacted: secret]"),
        ("Mein Passwort ist hunter2", "Mein Passwort ist [redacted: secret]"),
        ("client_secret=abcdefghijklmnop", "client_secret=[redacted: secret]"),
        ("SECRET_KEY='abcdefghijklmnopqrst'", "SECRET_KEY='[redacted: secret]'"),
        ("Bearer abcdefghijklmnopqrstuvwxyz", "Bearer [redacted: token]"),
        ("Bearer: abcDEF123_456-789.xyz", "Bearer: [redacted: token]"),
        ("postgres://u:p@ss/w0rd@host/db", "postgres://u:[redacted: password]@host/db"),
        ("https://user:pa:ss@host", "https://user:[redacted: password]@host"),
        (
            f"https://api.telegram.org/bot{_KEYS['telegram']}/getMe",
            "https://api.telegram.org/bot[redacted: token]/getMe",
        ),
        ("GET /x?token=9f8e7d6c5b4a3210", "GET /x?token=[redacted: secret]"),
        ("token=deadbeefdeadbeefdeadbeef", "token=[redacted: secret]"),
        ('mysql --password=\\"hunter2\\" db', "mysql --password=[redacted: password] db"),
        *((f"card {card}, ok", "card [redacted: card number], ok") for card in _CARDS),
    ],
)
def test_planted_secret_is_redacted_and_rest_unchanged(said: str, kept: str) -> None:
    assert redact(said).text == kept
    assert redact(said).count == kept.count("[redacted: ")


def test_every_secret_is_counted() -> None:
    said = f"{_KEYS['aws']} and {_KEYS['github']}, password=hunter2 {_CARDS[0]} {_CARDS[0]}"
    assert redact(said).count == 5


def test_password_before_another_secret_is_redacted() -> None:
    found = redact(f"Password: tulip {_CARDS[0]}")
    assert found == RedactedText("Password: [redacted: password] [redacted: card number]", 2)


def test_every_secret_is_redacted_in_place() -> None:
    said = f'{_CARDS[0]} a {_KEYS["github"]} b "pwd": "x" c {_KEYS["aws"]} d {_CARDS[0]} e'
    kept = "[redacted: card number] a [redacted: token] b "
    kept += '"pwd": "[redacted: password]" c [redacted: access key] d [redacted: card number] e'
    assert redact(said) == RedactedText(kept, 5)


@pytest.mark.quick(13)
@pytest.mark.parametrize(
    "said",
    [
        "123e4567-e89b-12d3-a456-426614174000",
        "12345678-1234-1234-1234-123456789012",
        "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "call me at +1 415 555 0132 or +49 30 901820, or 0041-44-668-18-00",
        "order 4111111111111112, invoice 1234 5678 9012 3456, at 1700000000000",
        "the ratio is 0.4111111111111111 and 4111111111111111.5",
        "chat -1001234567890, snowflake 1234567890123456789",
        "sk-learn-compatible-estimators-with-a-long-name-of-2026",
        "skip this; risk-assessment-of-the-whole-project-plan",
        "a task-1234567890123456789012345 is no key",
        "eyJust.eyJoking",
        "The password is checked against the hash, and never stored.",
        "The password is case-sensitive. It is too short. The password is not right.",
        "I forgot the password to my laptop. Is the password wrong?",
        "Password: required. Password: at least 8 characters. Password must differ.",
        "password = getpass()",
        "password=None, token=True, secret=null",
        "password: str = Field()",
        "password=$PASSWORD, password=${DB_PASSWORD}, password=<your password>, pwd=****",
        "password=os.environ['X']",
        "the secret is to stir slowly; the secret: patience",
        "max_tokens=4096 and tokens: 12000000",
        "the next token: word; token = tokenize(text)",
        '{"max_tokens": 4096, "token": "Hello", "logprob": -0.5}',
        '{"password": "", "token": null, "secret": false, "api_key": "${API_KEY}", "pin": 17}',
        '{"title": "On tokens", "token_type": "bearer", "key": "k", "password_policy": "long"}',
        "\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "api_key: the key that you were given",
        "Bearer authentication is described in chapter twelve",
        "the bearer of-this-letter-is-known-to-me may pass",
        "https://example.com:8080/a@b and mailto:bob@example.com",
        '{"at":"http://h:80/x","mail":"bob@example.com"} and http://h:8080',
        "api_key=the_key_of_my_account, api_key = read_the_key_from(path)",
        "the secret of it is incomprehensibilities; a secret: it is known",
        "GPIO pin: 17, pin = 5, spin: 4821, pinned: 4821",
        "versions 1111.2222.3333.4444 and 4111.1111.1111.1112",
        "pin the version; my pin is lost; PIN 560001",
        "Alice eats no meat, was born on 1990-04-12 and lives at 221B Baker Street.",
        "GB82 WEST 1234 5698 7654 32",
        "AKIA is a prefix, ghp_ too, and xoxb- as well",
        "the glrt-based-detection-of-targets-in-noise, gldt-tables-of-all-countries-2026",
        "hvs.compute_the_histogram_of_all_values(x), dp.pt.x, pplx-70b-online, pplx-7b-chat-alpha",
        "r8_ and ntn_ and sbp_ are prefixes; rubygems_version, lin_api_client_for_python_projects",
        "https://discord.com/api/webhooks/ and https://h/login?code= and ?sig=short",
        "mysql -p, mysql -p db, mysql -pPASSWORD db, mysql -p$PW db, mysql --port 3306 -P3306",
        "Mathematical_Optimization.module.a_very_long_attribute_name_of_it",
        "the dapivirine ring; steno=1; stenography=2.5; secret_key_base: <see the vault>",
        "the master key: a story; a jwt key is needed; fernet key: see below",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBg\n-----END PUBLIC KEY-----",
        "",
    ],
)
def test_text_without_secrets_is_unchanged(said: str) -> None:
    assert redact(said) == RedactedText(said, 0)


_FIELDS = [
    "password",
    "db_password",
    "userPassword",
    "passphrase",
    "api_key",
    "apiKey",
    "X-API-Key",
    "authorization",
    "Proxy-Authorization",
    "token",
    "accessToken",
    "secret",
    "client_secret",
    "AWS_SECRET_ACCESS_KEY",
    "private_key",
    "Set-Cookie",
]
_VALUES = [
    "hunter2",
    "x",
    "open sesame",
    'a "quoted" one',
    "back\\slash\\",
    "l1\nl2",
    "пароль",
    "Basic a",
]


def _escaped(value: Any, times: int) -> str:
    """Return JSON in a text, nested `times` times."""
    text = json.dumps(value)
    for _ in range(times):
        text = json.dumps({"said": text, "and": 'a "word"'})
    return text


@pytest.mark.parametrize("times", range(5))
@pytest.mark.parametrize("name", _FIELDS)
def test_secret_is_recognized_by_its_field_name(name: str, times: int) -> None:
    for value in _VALUES:
        fields = {"before": "stays", name: value, "after": ["stays", 1]}
        found = redact(_escaped(fields, times))
        assert found.count == 1
        data = json.loads(found.text)
        for _ in range(times):
            data = json.loads(data["said"])
        assert data.pop(name).startswith("[redacted: ")
        assert data == {"before": "stays", "after": ["stays", 1]}
        assert redact(found.text) == RedactedText(found.text, 0)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("{'password': 'it\\'s'}", "{'password': '[redacted: password]'}"),
        ("'password' => 'hunter2',", "'password' => '[redacted: password]',"),
        ('{"password": 12345678}', '{"password": "[redacted: password]"}'),
        ('{"cvv": "123", "otp": 4821}', '{"cvv": "[redacted: pin]", "otp": "[redacted: pin]"}'),
        ('{"cvv": 123, "otp": 123}', '{"cvv": "[redacted: pin]", "otp": 123}'),
        ('cut: {"password": "hunt', 'cut: {"password": "[redacted: password]'),
        ('{"password": "hunt\nand more', '{"password": "[redacted: password]\nand more'),
        (
            '{"secret": {"name": "a", "of": ["b", {"c": "d"}]}, "e": "f"}',
            '{"secret": {"name": "[redacted: secret]", "of": ["[redacted: secret]", '
            '{"c": "[redacted: secret]"}]}, "e": "f"}',
        ),
    ],
)
def test_other_notations_of_a_secret_field_are_redacted(said: str, kept: str) -> None:
    assert redact(said) == RedactedText(kept, kept.count("[redacted: "))


@pytest.mark.parametrize("unseen", "\u200b\u200c\u200d\u00ad\u2060\ufeff\u200e\ufe0f")
def test_invisible_characters_do_not_hide_secrets(unseen: str) -> None:
    for key in (_KEYS["aws"], _KEYS["github"], _KEYS["anthropic"]):
        hidden = unseen.join((key[:3], key[3:9], key[9:]))
        assert redact(f"use {hidden}!").text.startswith("use [redacted: ")
        in_text = redact(json.dumps({"said": hidden}))
        assert in_text.count == 1
        assert key[12:] not in in_text.text
    assert redact(f'{{"pass{unseen}word": "x"}}').count == 1
    found = redact(f"pass{unseen}word=hun{unseen}ter2")
    assert found == RedactedText(f"pass{unseen}word=[redacted: password]", 1)
    assert redact_data({f"pass{unseen}word": "x"}).count == 1


_FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f"


def test_invisible_characters_are_kept_in_harmless_text() -> None:
    key = _KEYS["aws"]
    said = f"{_FAMILY} {key[:5]}\u200b{key[5:]} {_FAMILY} password=x\u200d9y {_FAMILY}"
    kept = f"{_FAMILY} [redacted: access key] {_FAMILY} password=[redacted: password] {_FAMILY}"
    assert redact(said) == RedactedText(kept, 2)


def test_nested_secrets_count_as_one() -> None:
    said = (
        f"a \u200bb https://u:x{_KEYS['aws'][:4]} {_KEYS['aws']} https://u:{_KEYS['aws']}y@h \u200b"
    )
    found = redact(said)
    assert _KEYS["aws"] not in found.text
    assert found.count == found.text.count("[redacted: ")
    assert found.text.startswith("a \u200bb https://")
    assert found.text.endswith("@h \u200b")


def test_secrets_with_escaped_letters_are_redacted() -> None:
    key = _KEYS["aws"]
    assert redact(f"AKI\\u0041{key[4:]}!").text == "[redacted: access key]!"
    assert redact('see {"p\\u0061ssword": "x\\u0061"}!').count == 1
    assert redact("caf\\u00e9 \\u0041 password=x9y").text.startswith("caf\\u00e9 \\u0041 ")


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Set-Cookie: session=a1b2; Path=/", "Set-Cookie: session=[redacted: cookie]; Path=/"),
        ("cookie: a=1; sid=x\nHost: b", "cookie: [redacted: cookie]\nHost: b"),
        ("<a><password>x y</password></a>", "<a><password>[redacted: secret]</password></a>"),
        ('<Token a="b">x1</Token>', '<Token a="b">[redacted: secret]</Token>'),
        ("Authorization: Token 9f8e7d6c5b", "Authorization: Token [redacted: token]"),
        ("gh --token x9y8z7 list", "gh --token [redacted: secret] list"),
        ('x --db-password "a b" -v', 'x --db-password "[redacted: secret]" -v'),
        ("sshpass -p tulip99 ssh x", "sshpass -p [redacted: password] ssh x"),
        ("curl -s -u bob:tulip https://h", "curl -s -u bob:[redacted: password] https://h"),
        ("AccountKey=aB3dE5fGaB3dE5fGaB3d==;", "AccountKey=[redacted: access key];"),
        ("machine h login u password tulip", "machine h login u password [redacted: password]"),
        ("AGE-SECRET-KEY-1" + "QPZRY9X8" * 7 + " a", "[redacted: private key] a"),
        ("user%5Bpassword%5D=hunter2", "user%5Bpassword%5D=[redacted: password]"),
        ("**Password**: hunter2", "**Password**: [redacted: password]"),
        ("- **Password:** hunter2", "- **Password:** [redacted: password]"),
        ("__Password:__ `hunter2`", "__Password:__ `[redacted: password]`"),
        ("**API key:** Zx91kQmv8sLp02Ty", "**API key:** [redacted: secret]"),
        ("**PIN:** 4821", "**PIN:** [redacted: pin]"),
        ('see {"password"          : "x"}', 'see {"password"          : "[redacted: password]"}'),
        ('see {"user[password]": "x"}', 'see {"user[password]": "[redacted: password]"}'),
        ('{"password":-12345678}', '{"password":"[redacted: password]"}'),
    ],
)
def test_secrets_in_commands_headers_and_elements_are_redacted(said: str, kept: str) -> None:
    assert redact(said) == RedactedText(kept, 1)
    assert redact(kept) == RedactedText(kept, 0)


@pytest.mark.parametrize(
    "said",
    [
        "--token is needed; --password to set one; --token TOKEN --password $PW --api-key <key>",
        "docker run -u 1000:1000 x",
        "default login page password field",
        "<title>password</title> <password>string</password> <p>a</p>",
        "The cookie: chocolate. cookie: yes",
        "Authorization: Token authentication",
        '{"password": 123} {"password": 12.5} {"token": 5000} {"pass": 1200}',
        'see {"password": {"type": "string", "description": "at least 8", "minLength": 128}}',
        'see {"auth": {"user": "bob"}, "auth": "none"}',
    ],
)
def test_text_similar_to_commands_or_headers_is_unchanged(said: str) -> None:
    assert redact(said) == RedactedText(said, 0)


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "name",
    [
        *("pass", "db_pass", "smtpPass", "pw", "passkey", "auth", "X-Auth-Key", "sessionid"),
        *("tokenValue", "password (prod)", "password@prod", "user[password]", "\uff50assword"),
        *("x" * 70 + "password", "x" * 70 + "_api_key", "Cookie", "session_cookie"),
    ],
)
def test_more_field_names_mark_secrets(name: str) -> None:
    assert redact_data({name: "Hunter2=x", "b": "c"}).value.pop(name).startswith("[redacted: ")
    assert redact_data(json.dumps({name: "Hunter2=x"})).count == 1


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "value",
    [
        {"usage": {"token": 5000}, "secrets": {"count": 1200}, "password": 123, "otp": 123},
        {"password": {"tries": 1200, "on": True}, "api_key": 12345678, "pass": 1200},
        {"password": {"type": "string", "description": "at least 8", "minLength": 128}},
        {"properties": {"token": {"$ref": "#/x"}, "secret": {"enum": ["a", "b"]}}},
        {"credentials": {"type": "object", "properties": {"user": {"const": True}}}},
        {"next_page_token": "abc", "pageToken": "CAUQAA", "nextToken": "x", "eos_token": "</s>"},
        {"cookies": ["oatmeal", "ginger"], "cookie": "chocolate chip"},
        {"mountain_pass": "Gotthard", "boarding_pass": "LH 123", "bypass": "x", "compass": "N"},
        {"has_password": "maybe", "is_secret": "a bit", "password_required": "always"},
        {"password": "required", "otp": "yes", "token": "no"},
        {"authorization": "pending", "Authorization": "granted", "credentials": "same-origin"},
        {"secret": {"description": "what it is for", "title": "A title"}},
        {"auth": {"user": "bob", "kind": "basic"}, "x": {"auth": "oauth2"}},
    ],
)
def test_data_without_secrets_is_unchanged(value: Any) -> None:
    assert redact_data(value).value == value
    assert redact_data(json.dumps(value)).value == json.dumps(value)


def test_values_in_schemas_are_redacted() -> None:
    value = {"password": {"type": "string", "default": "hunter2", "properties": {"pwd": "x"}}}
    assert redact_data(value).value == {
        "password": {
            "type": "string",
            "default": "[redacted: password]",
            "properties": {"pwd": "[redacted: password]"},
        }
    }


@pytest.mark.parametrize("names", [("name", "value"), ("Name", "Value"), ("KEY", "VALUE")])
def test_sibling_name_field_marks_a_secret(names: tuple[str, str]) -> None:
    for fields in (names, names[::-1]):
        pair = dict.fromkeys(fields, "DB_PASSWORD") | {names[1]: "hunter2"}
        found = redact_data({"Environment": [pair]})
        assert found.value["Environment"][0][names[1]] == "[redacted: password]"
        assert found.count == 1


def test_redaction_in_json_text_changes_only_the_secrets() -> None:
    before = '{\n  "f": 1.10, "e": 1e5,"z":-0.0,  "n": NaN, "u": "\\u00e9\\/", "dup": 1, "dup": 2,'
    text = (
        before + ' "big": 12345678901234567890123, "password":  "a\\"b", "pin": 4821, "é": "%s"}\n'
    )
    found = redact_data({"content": text % f"{_FAMILY} pwd=x9y"})
    stub = '"password":  "[redacted: password]", "pin": "[redacted: pin]"'
    kept = text.replace('"password":  "a\\"b", "pin": 4821', stub)
    assert found.value == {"content": kept % f"{_FAMILY} pwd=[redacted: password]"}
    assert found.count == 3
    half = '["\\ud800 pwd=x9y", "\\u00e9"]'
    assert redact_data(half).value == half.replace("x9y", "[redacted: password]")
    assert redact_data('"{\\"p\\\\u0061ssword\\":\\"x\\"}"').count == 1


def test_private_key_split_over_list_items_is_redacted() -> None:
    lines = _PEM.splitlines(keepends=True)
    lines[2:2] = [lines[1], "x: [] {}\n"]
    found = redact_data({"source": ["key:\n", *lines, "print()"], "n": "stays"})
    assert found.value == {
        "source": ["key:\n", *["[redacted: private key]"] * len(lines), "print()"],
        "n": "stays",
    }
    found = redact_data([lines[0], "", lines[1]])
    assert found.value == ["[redacted: private key]", "", "[redacted: private key]"]


@pytest.mark.parametrize("hidden", ["AKI\\u0041", "AK\u200bIA", "AK\\u200bIA"])
def test_no_escape_in_json_hides_a_secret(hidden: str) -> None:
    key = _KEYS["aws"]
    found = redact_data(f'{{"a": "{hidden}{key[4:]}", "b": "http:\\/\\/u:tulip@h"}}')
    assert found.count == 2
    assert key[5:] not in found.value
    assert "tulip" not in found.value


def test_data_is_redacted_at_any_depth() -> None:
    call = {"name": "login", "arguments": '{"user":"bob","password":"hunter2"}'}
    found = redact_data(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": f"key {_KEYS['aws']}"}, {"api_key": "short"}],
            "tool_calls": [{"id": "1", "function": call}],
            "headers": [{"name": "Authorization", "value": "Basic a"}, {"name": "x", "value": "y"}],
            "env": {"DB_PASSWORD": 123456, "PORT": 5432, "TOKEN": ["a", "b"], "DEBUG": True},
            _KEYS["github"]: "its name is one",
            "logprobs": [{"token": "Hel", "logprob": -1.5}],
        }
    )
    assert found.value == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "key [redacted: access key]"},
            {"api_key": "[redacted: api key]"},
        ],
        "tool_calls": [
            {
                "id": "1",
                "function": {
                    "name": "login",
                    "arguments": '{"user":"bob","password":"[redacted: password]"}',
                },
            }
        ],
        "headers": [
            {"name": "Authorization", "value": "[redacted: token]"},
            {"name": "x", "value": "y"},
        ],
        "env": {
            "DB_PASSWORD": "[redacted: password]",
            "PORT": 5432,
            "TOKEN": ["[redacted: token]", "[redacted: token]"],
            "DEBUG": True,
        },
        "[redacted: token]": "its name is one",
        "logprobs": [{"token": "Hel", "logprob": -1.5}],
    }
    assert found.count == 8


@pytest.mark.parametrize(
    "text",
    [
        '{"said": "password=hunter2"}',
        '{"said": "password=hunter2", "at": 1e400}',
        '[{"a": {"token": "x"}}, "password: hunter2"]',
        "[" * 100_000 + '"password=hunter2"',
        "[" * 20_000 + '{"password": "hunter2"}' + "]" * 20_000,
        '{"said": "password=hunter2", "big": ' + "1" * 5_000 + "}",
    ],
)
def test_json_text_in_data_stays_valid_json(text: str) -> None:
    found = redact_data(text)
    assert found.count >= 1
    assert "hunter2" not in found.value
    if len(text) < 100 and "e400" not in text:
        json.loads(found.value)
    assert redact_data(found.value).count == 0


@given(
    st.lists(
        texts()
        | st.sampled_from([*_KEYS.values(), _PEM, *_CARDS, "password=", "pwd is ", "://a:b@"])
        | st.sampled_from(
            ['"password":', "\\", '"', '\\"', "{", "[", "]", "}", '"pin"', ":", "4821"]
        )
        | st.sampled_from(
            [
                *("--token", "Cookie: a=b", "Set-Cookie: c=d", "<password>", "</password>", "curl"),
                *("-u a:b", "sshpass -p", "machine a login b password", "Authorization: Token"),
                *("\u200b", "pass\u200dword", "\\u0061", "p\\u0061ssword=", "token", "is", "key="),
                "\n",
                *("SMTP_PASS=", "X_AUTH=", "pass: ", "pass=", "token: '", "'", "set", "a1B2c3D4e5"),
                *("identified by '", "with password '", "-b a=", "docker login -p ", "redis-cli"),
                *("\x1b[32m", "\x1b]0;", "\x07", "\x1b", "\\x1b[0m", "?code=", "://", "@", "_"),
                *('<add key="token" value="', "setPassword('", "')", "eyJabcdefgh.", "=", "{ "),
            ]
        ),
    ),
    st.sampled_from(["", " "]),
)
def test_redacted_text_has_no_more_secrets(parts: list[str], between: str) -> None:
    once = redact(between.join(parts))
    assert redact(once.text) == RedactedText(once.text, 0)


_said = texts() | st.sampled_from(["pwd=x9y", "x", "Hunter2", "string", "4821", "DB_TOKEN"])
_names = st.sampled_from(["password", "name", "value", "type", "token", "pin", "auth", "a", "b c"])


@given(
    st.recursive(
        _said | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(_names, inner),
    ),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_data_and_its_json_text_are_redacted_alike(
    value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    found, data = redact_data(text), redact_data([value])
    assert json.loads(found.value) == data.value
    assert found.count == data.count
    if not found.count:
        assert found.value == text


@pytest.mark.parametrize(
    "piece",
    [
        "sk-",
        "eyJ",
        "eyJaaaaaaaa.",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN ",
        "password=$password",
        "password is ",
        "password to a ",
        "password=",
        "4111 ",
        "1 ",
        "1",
        "://a:",
        "://a:@",
        "://a:b@/",
        "pin: ",
        "secret=abcdefghijklmno ",
        "bearer abcdefghijklmno-",
        "4111.",
        "bearer a",
        "-",
        " ",
        "token=",
        "\\",
        '"',
        '\\"',
        "\u200b",
        "\\u200b",
        '"a":',
        '"password":',
        '"password":[',
        '"password":{"',
        '"password": "',
        '"password": "\\',
        '"password":" ',
        '\\"password\\": \\"',
        '{"password":',
        '"token":"a","logprob":1,',
        '"a" ',
        '"password" ',
        '"password":{"type":"string",',
        "\\u0061",
        "curl -u a:",
        "-u a:",
        "--token ",
        "--a-b-c-",
        "machine a login ",
        "cookie: a=",
        "cookie: a",
        "<a>",
        "<a ",
        "<a>b</",
        "accountkey=",
        "key=a ",
        "glrt-",
        "hvs.",
        "dp.pt.",
        "M" + "a" * 24 + ".aaaaaa.",
        "Ma",
        "mysql ",
        "mysql -p",
        "Private-Lines: 1\n",
        "Private-Lines: 1\na\n",
        "?sig=",
        "steno=1.",
        "/login?code=",
        "webhook.office.com/webhookb2/",
        "A=",
        "SMTP_PASS=",
        "SMTP_PASS=a",
        "A_PASS",
        "\nsmtp_pass=",
        "\nsmtp_pass: a",
        "\n\t",
        "//a:",
        "{ pass: ",
        "{ ",
        "pass: '",
        "pass='a",
        "a_token",
        'name="a" value=',
        "name=",
        "setPassword(",
        "setPassword('",
        "docker login ",
        "docker login -p ",
        "login ",
        "redis-cli ",
        "-pass pass:",
        "identified by ",
        "identified with a ",
        "with password '",
        "curl -b a=",
        "-b '",
        "://aaaaaaaaaaaaaaaa1",
        "?code=",
        "&key=a1",
        "?x-amz-signature=",
        "eyJaaaaaaaa.aaaaaaaa.",
        "eyJaaaaaaaa..",
        "pat",
        "key-",
        "a8Q~",
        "sq",
        "A3-AAAAAA-",
        "0123456789abcdef",
        "\x1b",
        "\x1b[",
        "\x1b[0",
        "\x1b ",
        "\x1b]",
        "\x1b]0;password=a\x07",
        "\x9d",
        "\x1b]a",
        "\x1b]" + "a" * 9_000,
        "\x9da",
        "\x80\x9d",
        "\\x1b[",
        "\\033[0",
        "\\u009b",
        "\\x1b(",
        "\\x1b ",
        "\\nsk-",
        "%0Aeyj",
        "ENV ",
        "\nENV A",
        "\nENV A_PASS ",
        "\nPASSPHRASE=",
        "passphrase=aa ",
        "\na_passphrase=aa aa ",
        "\npass=aaa-",
    ],
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    # Quadratic patterns would take minutes and exceed the suite's time limit.
    hostile = piece * (100_000 // len(piece))
    assert redact(hostile).count <= len(hostile) // len(piece)


@pytest.mark.parametrize(
    "piece", ["\\", '"', '"password":', '"password":[', '"password": "\\', "\\u200b"]
)
def test_megabyte_of_hostile_fields_is_redacted_in_time(piece: str) -> None:
    hostile = piece * (1_000_000 // len(piece))
    assert redact_data({"arguments": hostile}).count <= len(hostile) // len(piece)


def test_short_text_is_not_shortened_by_redact_ends() -> None:
    assert redact_ends("pwd=hunter2 " * 3, max_end_length=18) == redact("pwd=hunter2 " * 3)
    assert redact_ends(f"a {_PEM}{_PEM} b", max_end_length=50) == redact(f"a {_PEM}{_PEM} b")
    assert redact_ends(" " * 30_000, max_end_length=2_000).text.strip() == "…"
    assert redact_ends("x" * 30_000, max_end_length=2_000).text.strip() == "…"


def test_redact_ends_keeps_both_ends_of_a_long_text() -> None:
    found = redact_ends(
        "the first words " + "so it went on " * 2_500 + "and the last", max_end_length=3_000
    )

    assert found.text.startswith("the first words so it")
    assert found.text.endswith("and the last")
    assert 5_500 < len(found.text) < 6_500
    assert found.count == 0


_SECRETS = {
    **_KEYS,
    "password": "password is: 'one two three four'",
    "private key": _PEM.replace("\n", "\nMIIEow+/" * 4_000),
    "long token": "ey" + "J" + _random(4_000) + "." + "ey" + "J" + _random(4_000),
    "card": _CARDS[0],
}


@pytest.mark.parametrize("name", _SECRETS)
@pytest.mark.parametrize("around", ["word ", "x"])
def test_no_cut_leaves_part_of_a_secret(name: str, around: str) -> None:
    secret, most = _SECRETS[name], 2_000
    shown = ("one two", "three four") if name == "password" else (secret[:12], secret[-9:])
    before, after = around * (14_000 // len(around)) + " ", " ok" * 8_000
    for place in (3, len(secret) // 2, len(secret) - 3):
        for cut in (most, most + 10_000):
            begins = before[-(cut - place) :] + secret + after
            ends = after + before[-cut:] + secret + after[: cut - len(secret) + place]
            for text in (begins, ends):
                kept = redact_ends(text, max_end_length=most).text
                assert not any(part in kept for part in shown)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", _KEYS)
@pytest.mark.parametrize("before", ["word ", "\n        ", "\x1b[1m", '{"a":1},', "鍵"])
def test_no_start_of_a_text_has_part_of_a_secret(name: str, before: str) -> None:
    key = _KEYS[name]
    for length in (len(before) * 60 + 12, len(before) * 60 + len(key) - 2):
        text = f"a{before * 60} {key}{before}end"
        assert key[:9] not in redact_text(cut_start(text, length))
        for size in range(1, length):
            assert key[:9] not in redact_text(line_start(text, size))
            assert len(line_start(text, size)) <= size + 1


def test_start_of_a_text_keeps_whole_words() -> None:
    assert cut_start("one two three", 13) == "one two three"
    assert cut_start("one two three", 9) == "one two "
    assert cut_start("x" * 9_000, 8_000) == "x" * (8_000 - 4_096)
    assert cut_start("東" * 200, 80) == "東" * 80
    assert line_start("one\n\n two  three", 13) == "one two three"
    assert line_start("one\n\n two  three", 9) == "one two …"


_LONG_LINES = [_random(64) for _ in range(100)]
_LONG_VALUES = [f"c{number}={_random(20)}" for number in range(150)]


@pytest.mark.parametrize(
    ("secret", "parts"),
    [
        ("\n".join(["Private-Lines: 100", *_LONG_LINES, "Private-MAC: 0\n"]), _LONG_LINES),
        (f"\nCookie: {'; '.join(_LONG_VALUES)}\n", _LONG_VALUES),
    ],
    ids=["putty", "cookie"],
)
def test_no_cut_leaves_part_of_a_long_secret(secret: str, parts: list[str]) -> None:
    rest = " ok" * 12_000
    for end in range(0, 13_000, 500):
        for text in (rest[:end] + secret + rest, rest + secret + rest[:end]):
            kept = redact_ends(text, max_end_length=2_000).text
            assert not any(part in kept for part in parts)


_ESC = "\x1b"
_SEQUENCES = {
    "colour": f"{_ESC}[32m",
    "colour of 8 bits": "\x9b1;32m",
    "cursor": f"{_ESC}[2K",
    "charset": f"{_ESC}(0",
    "title": f"{_ESC}]0;a title\x07",
    "link": f"{_ESC}]8;;https://h.example/x{_ESC}\\",
    "bell": "\x07",
    "backspace": "\x08",
    "C1": "\x84",
    "writing direction": "\u202e",
    "escape in JSON": "\\u001b[32m",
    "escape in a shell": "\\033[32m",
    "escape in a program": "\\x1b[32m",
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", _KEYS)
def test_colour_before_a_key_does_not_hide_it(name: str) -> None:
    key = _KEYS[name]
    for sequence in _SEQUENCES.values():
        found = redact(f"got {sequence}{key}{_ESC}[0m.")
        assert key[8:] not in found.text, sequence
        assert found.count == 1
        assert found.text.startswith("got ")


_ESCAPES = [
    *("\\n", "\\t", "\\r\\n", "\\a", "\\b", "\\f", "\\v", "\\0", "\\\\n", "\\x0a", "\\012"),
    *("\\u0007", "\\u000A", "\\r\\u001b[K", "\\u001b(B\\u001b[m", "\\u001b]0;a\\u0007", "\\x1b(B"),
    *("\\u009b32m", "\\x9b1m", "%0A", "%3d"),
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", _KEYS)
def test_escape_before_a_key_does_not_hide_it(name: str) -> None:
    key = _KEYS[name]
    for before, escape in product(("", "a ", "a\\n"), _ESCAPES):
        found = redact(f'print("{before}{escape}{key}")')
        assert key[8:] not in found.text
        assert found.count == 1
        assert found.text.startswith(f'print("{before}')
    assert redact(f"word{key[:4]}").count == 0


@pytest.mark.quick(5)
@pytest.mark.parametrize("sequence", _SEQUENCES)
def test_control_sequence_inside_a_key_does_not_hide_it(sequence: str) -> None:
    key = _KEYS["github"]
    for cut in (1, 3, 12, len(key) - 1):
        text = f"got {key[:cut]}{_SEQUENCES[sequence]}{key[cut:]} now"
        assert redact(text) == RedactedText("got [redacted: token] now", 1)
        assert (
            redact_data(json.dumps({"said": text})).value == '{"said": "got [redacted: token] now"}'
        )


def test_secret_inside_a_window_title_is_redacted() -> None:
    title = f"{_ESC}]0;{_KEYS['aws']} x\x07"
    assert redact(f"a{title}b") == RedactedText(f"a{_ESC}]0;[redacted: access key] x\x07b", 1)
    github = _KEYS["github"]
    assert redact(f"{github[:20]}{title}{github[20:]}") == RedactedText("[redacted: token]", 1)


def test_key_after_an_escape_character_is_redacted_whole() -> None:
    assert redact(f"a {_ESC}{_KEYS['github']}") == RedactedText("a [redacted: token]", 1)


@pytest.mark.parametrize(
    "start", [f"{_ESC}]0;", f"{_ESC}P", f"{_ESC}X", f"{_ESC}_", "\x9d", "\x90"]
)
def test_cut_control_sequence_hides_no_secret_and_no_text(start: str) -> None:
    key = _KEYS["github"]
    shown_start = start[2:] if start[0] == _ESC else ""
    text = f"a {start}{key} b\nthe rest"
    assert redact(text).count == 1
    assert key[8:] not in redact(text).text
    assert redact_text(text) == f"a {shown_start}[redacted: token] b\nthe rest"
    inside = f"a {key[:12]}{start}{key[12:]} b\nthe rest"
    assert redact_text(inside).endswith("b\nthe rest")
    if not shown_start:
        assert redact_text(inside) == "a [redacted: token] b\nthe rest"
