"""Recognition of secrets: by the name of their field, by their form, or by the words before them.

Each search takes linear time on any text: no value of a field is scanned twice, each pattern starts
only at the start of a run of its characters and uses possessive quantifiers, and matches that a
function has to check afterwards are short.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, Final
from unicodedata import normalize

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern

# --- field names -----------------------------------------------------------------------------
# In a text, field names are found if they are quoted, as in JSON and programs. The quotes may be
# escaped several times, because arguments and results of tools are often JSON inside JSON.


class SecretKind(Struct, frozen=True):
    """A kind of secret with the names of its fields."""

    name: str
    field_pattern: str
    """Pattern of field names in lower case, with `_` between words."""
    safe_values: str = "(?!)"
    """Pattern of values that are not secrets."""
    min_digits: int = 0
    """Minimum number of digits of a number that is a secret; 0 if no number is a secret."""
    includes_nested: bool = True
    """Whether all values inside an object or list in a field of this kind are secrets."""


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern on first use: compiling is slow, and most texts have no field names."""
    return re.compile(pattern)


_PASS_PREFIXES: Final = """
    account admin api app auth backup basic become bind broker client current db email ftp http imap
    key keystore ldap login mail mailer mongo mqtt my mysql new old pg pop3 postgres proxy rabbitmq
    redis relay remote root sasl sender server service sftp smtp ssh sudo truststore user vault vpn
    webdav wifi
"""
"""Words before `pass` that make it a password, unlike in `mountain_pass` or `boarding_pass`."""
_LOGIN_WORDS: Final = "|".join(_PASS_PREFIXES.split())
_NON_SECRET_TOKENS: Final = (
    r"(?:.*_)?(?:next|prev|previous|page|paging|pagination|continuation|cursor|sync|start|end|stop"
    r"|resume|cancellation|eos|bos|pad|unk|mask|sep|cls)_?token"
)
"""Pattern of names of pagination tokens and special tokens of models, which are not secret."""
_FLAG_NAMES: Final = (
    r"(?:has|had|is|was|needs?|requires?|uses?|supports?|shows?|hides?|forgot|allows?|enables?)_.*"
)
_SECRET_KINDS: Final = (
    SecretKind(
        "password",
        r".*(?:password|passwd|passphrase|passcode|passwort|kennwort)s?(_hash)?|(?:.*_)?pwd",
        min_digits=4,
    ),
    SecretKind(
        "password",
        rf"(?:(?:.*_)?(?:{_LOGIN_WORDS})_?)?pass|(?:.*_)?pw|passkey",
        "(?i)ok(?:ay)?|pass(?:ed)?|fail(?:ed)?|skip(?:ped)?|done|n/?a",
    ),
    SecretKind("secret", r".*credentials?", "same-origin|include|omit"),
    SecretKind("private key", r".*private_?keys?|client_key_data"),
    SecretKind(
        "api key",
        r".*(?:api|app|access|admin|signing|encryption|master|account|subscription|fernet|hmac"
        r"|pre_?shared)_?keys?",
    ),
    SecretKind("secret", r".*secrets?|.*secret_?(?:access_?)?keys?(?:_?base)?"),
    SecretKind("token", r".*token(?:_?value)?|(?:.*_)?(?:jwt|bearer|set_cookie|.+_cookies?)"),
    SecretKind("token", r"(?:x_)?auth_key|(?:php|j)?sess(?:ion)?id"),
    SecretKind("token", r"cookies?", r"[a-z]{1,12}(?: [a-z]{1,12}){0,3}"),
    SecretKind("token", r".*authorization", r"[a-z]{4,15}"),
    SecretKind(
        "token",
        rf"(?:(?:x|{_LOGIN_WORDS})_)?auth",
        r"[a-z]{2,12}[0-9]?",
        includes_nested=False,
    ),
    SecretKind("pin", r"(?:.*_)?(?:pin|pin_code|otp)", min_digits=4),
    SecretKind("pin", r"(?:.*_)?(?:cvv|cvc)", min_digits=3),
)
_NON_SECRET_NAME: Final = lazy_pattern(f"{_NON_SECRET_TOKENS}|{_FLAG_NAMES}")
_MAX_NAME_LENGTH: Final = 64
"""Number of characters at the end of a field name that are checked."""
_NAME_SUFFIX: Final = lazy_pattern(r"\s*+(?:\([^()]{0,60}\)|@[\w.-]{1,60})\s*+\Z")
"""Pattern of a suffix in a field name, such as `(prod)` in `password (prod)`."""
_CAMEL_CASE: Final = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS: Final = lazy_pattern(r"[^a-z0-9]+")

_FIELD_PLACEHOLDER: Final = lazy_pattern(
    r"(?i)\s*+(?:\[redacted: [a-z ]{1,20}\]|\*++|•++|x{3,}+|\.\.\.|…|<[^<>\s]{1,40}>"
    r"|\$\{[^{}\s]{1,60}\}|string\??|next_?token|null|none|nil|true|false|undefined|optional|required|yes|no)?\s*+"
)
"""Pattern of placeholders, references and types in place of a secret."""
_PIN_DIGITS: Final = lazy_pattern(r"\s*+[0-9]{3,8}\s*+")
_SCHEMA_TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
_SCHEMA_FIELDS: Final = ("properties", "$ref", "enum", "anyOf", "oneOf", "allOf")
_SCHEMA_VALUES: Final = ("value", "default", "const", "example")
"""Names of schema fields that contain values."""
_DESCRIPTION_FIELDS: Final = ("description", "title", "label", "placeholder")

_FIELD_NAME: Final = lazy_pattern(
    # A match starts at the first of several backslashes, so that each run is scanned once.
    r"(?<!\\)(?P<quote>\\{0,31}[\"'])(?P<name>[^\"'\\\n]{1,160})(?P=quote)\s*+(?:=>|[:=])\s*+"
)
_QUOTE: Final = lazy_pattern(r"(?P<escapes>\\{0,31})(?P<mark>[\"'])")
_BARE_NUMBER: Final = lazy_pattern(r"-?[0-9]{3,40}+(?![\w.\"'\\])")
_PUNCTUATION: Final = lazy_pattern(r"[\[\]{}]|(?<!\\)\\{0,31}[\"']")
_COLON: Final = lazy_pattern(r"\s*+:")
_LOGPROB_FIELD: Final = lazy_pattern(r"\s{0,8},\s{0,8}\\{0,31}[\"']logprob")
"""Pattern of the field after an output token of a model; such a token is not a secret."""

Span = tuple[int, int]


class SecretSpan(Struct, frozen=True):
    """The span of a secret in a text, and its replacement."""

    start: int
    end: int
    stub: str


@lru_cache(maxsize=4096)
def secret_kind(name: str) -> SecretKind | None:
    """Return the kind of secret that a field of this name contains, or None."""
    without_suffix = _NAME_SUFFIX.sub("", name[-2 * _MAX_NAME_LENGTH :])
    nfkc_name = without_suffix if without_suffix.isascii() else normalize("NFKC", without_suffix)
    normalized = _SEPARATORS.sub("_", _CAMEL_CASE.sub("_", nfkc_name[-_MAX_NAME_LENGTH:]).lower())
    normalized = normalized.strip("_").rstrip("0123456789_")
    if _NON_SECRET_NAME.fullmatch(normalized):
        return None
    return next(
        (kind for kind in _SECRET_KINDS if _compile(kind.field_pattern).fullmatch(normalized)), None
    )


def is_secret_value(kind: SecretKind, value: str) -> bool:
    """Return whether the value of a field of this kind is a secret and not a placeholder."""
    if kind.name == "pin":
        return _PIN_DIGITS.fullmatch(value) is not None
    return not (_FIELD_PLACEHOLDER.fullmatch(value) or _compile(kind.safe_values).fullmatch(value))


def is_secret_number(kind: SecretKind, value: str) -> bool:
    """Return whether a number in a field of this kind is a secret."""
    digits = value.removeprefix("-")
    has_digits = digits.isdecimal() and len(digits) >= kind.min_digits
    return kind.min_digits > 0 and has_digits and is_secret_value(kind, value)


def kind_of_nested_field(
    kind: SecretKind | None, name: str, *, has_schema: bool
) -> SecretKind | None:
    """Return the kind of a field in an object of this kind; None if its value is not secret.

    `has_schema`: the object is a schema, so only fields such as `default` can be secret.
    """
    if kind is None or not kind.includes_nested or name in _DESCRIPTION_FIELDS:
        return None
    return kind if not has_schema or name in _SCHEMA_VALUES else None


def is_schema(name: str, value: Any) -> bool:
    """Return whether an object with this field is a schema, which describes a type, not a value."""
    if name == "type":
        return isinstance(value, str) and value.lower() in _SCHEMA_TYPES
    return name in _SCHEMA_FIELDS


def stub_of(kind: SecretKind) -> str:
    """Return the replacement of a secret."""
    return f"[redacted: {kind.name}]"


def find_secret_fields(text: str) -> Iterator[SecretSpan]:
    """Yield the secrets of a text that follow the name of their field, in order."""
    position = 0
    while (match := _FIELD_NAME.search(text, position)) is not None:
        position = match.end()
        kind = secret_kind(match["name"])
        if kind is None:
            continue
        number = _BARE_NUMBER.match(text, position)
        if number is not None and is_secret_number(kind, number[0]):
            # Use the quotes of the name, so that JSON stays valid.
            stub = f"{match['quote']}{stub_of(kind)}{match['quote']}"
            yield SecretSpan(number.start(), number.end(), stub)
        spans, position = _find_value_spans(text, position, kind)
        for start, end in spans:
            if is_secret_value(kind, text[start:end]):
                yield SecretSpan(start, end, stub_of(kind))


def _find_value_spans(text: str, start: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of possibly secret strings in the value at `start`, and the value's end."""
    if text[start : start + 1] in ("[", "{"):
        return _find_nested_spans(text, start, kind) if kind.includes_nested else ([], start)
    quote = _QUOTE.match(text, start)
    if quote is None:
        return [], start
    end, quote_end = _find_quote_end(text, quote)
    return [] if _LOGPROB_FIELD.match(text, quote_end) else [(quote.end(), end)], quote_end


def _find_nested_spans(text: str, position: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of possibly secret strings in a list or object, and the end of the value."""
    depth, name, has_schema = 0, "", False
    spans = list[tuple[str, Span]]()
    while (match := _PUNCTUATION.search(text, position)) is not None:
        position = match.end()
        if match[0] in ("[", "{"):
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth <= 0:
                break
        elif (quote := _QUOTE.match(text, match.start())) is not None:
            end, position = _find_quote_end(text, quote)
            quoted_text = text[quote.end() : end]
            if _COLON.match(text, position):
                name = quoted_text
                has_schema = has_schema or (name != "type" and is_schema(name, None))
            else:
                spans.append((name, (quote.end(), end)))
                has_schema = has_schema or is_schema(name, quoted_text)
    else:
        position = len(text)
    return [
        span for name, span in spans if kind_of_nested_field(kind, name, has_schema=has_schema)
    ], position


def _find_quote_end(text: str, quote: re.Match[str]) -> Span:
    """Return the end of a quoted text, and the end of its closing quote.

    A newline also ends the text. Each level of escapes doubles the backslashes before a quote and
    adds one. A quote with as many backslashes as the opening quote closes the text. A quote with
    more backslashes also closes the text if the additional ones are escaped backslashes at the end
    of the text; otherwise the quote is part of the text. A quote with fewer backslashes closes an
    outer text, so this text ends too.
    """
    escape_count, position = len(quote["escapes"]), quote.end()
    end_pattern = _QUOTE_OR_NEWLINE[quote["mark"]]
    while (match := end_pattern.search(text, position)) is not None:
        backslash_start = match.start()
        while backslash_start > position and text[backslash_start - 1] == "\\":
            backslash_start -= 1
        backslash_count = match.start() - backslash_start
        if match[0] == "\n" or backslash_count < escape_count:
            return backslash_start, backslash_start
        if (backslash_count - escape_count) % (2 * (escape_count + 1)) == 0:
            return match.start() - escape_count, match.end()
        position = match.end()
    return len(text), len(text)


_QUOTE_OR_NEWLINE: Final = {mark: lazy_pattern(rf"[{mark}\n]") for mark in "\"'"}


# --- forms of secrets ------------------------------------------------------------------------
# Each pattern is specific enough to ignore ordinary prose, hashes, ids and phone numbers.


class SecretPattern(Struct, frozen=True):
    """A kind of secret, with the pattern that finds it."""

    name: str
    pattern: re.Pattern[str]
    """The secret is the group `quoted`, `bare` or `value`, or else the whole match."""
    hints: tuple[str, ...]
    """Words in lower case; a text without any of these words has no secret of this kind."""
    check: Callable[[re.Match[str]], bool] = bool

    def may_occur_in(self, lower_case_text: str) -> bool:
        """Return whether a text in lower case may contain a secret of this kind."""
        return any(hint in lower_case_text for hint in self.hints)


def _secret_pattern(
    name: str, hints: str, pattern: str, check: Callable[[re.Match[str]], bool] = bool
) -> SecretPattern:
    """Return the pattern of a kind of secret. `hints` are words separated by spaces."""
    return SecretPattern(name, lazy_pattern(pattern), tuple(hints.split()), check)


# The character before a word may be the end of an escape, such as a newline in JSON.
_NO_ESCAPE_REGEX: Final = (
    r"(?<!\\.)(?<!\\[x0-3][0-9A-Fa-f]{2})(?<!\\u00[0-9A-Fa-f]{2})(?<!%[0-9A-Fa-f]{2})"
)


def _key_pattern(
    name: str, hints: str, pattern: str, check: Callable[[re.Match[str]], bool] = bool
) -> SecretPattern:
    """Return the pattern of a key; a match must not start inside a longer word."""
    start = rf"(?<![A-Za-z0-9_-]{_NO_ESCAPE_REGEX})"  # guard: key-after-escape
    return _secret_pattern(name, hints, rf"{start}(?:{pattern})", check)


_ALPHANUMERIC_RUN: Final = lazy_pattern("[A-Za-z0-9]{16}")
"""16 letters or digits in a row, which words such as `sk-learn-compatible-api` do not have."""


def _has_alphanumeric_run(match: re.Match[str]) -> bool:
    return _ALPHANUMERIC_RUN.search(match[0]) is not None


_CHARACTER_KIND_CHANGE: Final = lazy_pattern("[a-z][A-Z]|[0-9][A-Za-z]|[A-Za-z][0-9]|[A-Z]{2}[a-z]")
"""A change of case or between letters and digits; hyphenated words have few, random keys many."""


def _looks_random(text: str) -> bool:
    return len(_CHARACTER_KIND_CHANGE.findall(text)) > 2


def _is_random_key(match: re.Match[str]) -> bool:
    return _looks_random(match[0])


def _has_random_run(match: re.Match[str]) -> bool:
    """Return whether the value has a long run of letters and digits that is no word."""
    run = _ALPHANUMERIC_RUN.search(match["value"])
    return run is not None and any(map(str.isdigit, match["value"])) and not run[0].isdigit()


def _is_credential(match: re.Match[str]) -> bool:
    """Return whether the text after `bearer` or `token` is a credential, not a word in prose."""
    value = match["value"]
    return any(map(str.isdigit, value)) or _ALPHANUMERIC_RUN.search(value) is not None


PRIVATE_KEY: Final = SecretPattern(
    "private key",
    # A truncated key extends to the end of the text.
    # The group `(?:…)*` is not possessive: Python before 3.11.3 matched one character too many.
    lazy_pattern(
        r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"[^-]*+(?:-(?!----)[^-]*+)*(?:-----END [A-Z0-9 ]{1,80}-----)?"
    ),
    ("private key",),
)

_PUTTY_KEY: Final = _secret_pattern(
    "private key",
    "private-lines:",
    # The key is base64, so it ends before the line `Private-MAC`, which has a hyphen.
    r"Private-Lines:[ \t]{0,4}[0-9]{1,4}(?:\r?\n|\\n)"
    r"(?P<value>(?:[A-Za-z0-9+/=]{1,120}(?:\r?\n|\\n|\Z)){1,400})",
)

_UUID_REGEX: Final = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![A-Za-z0-9])"
_JWE_PART: Final = "[A-Za-z0-9_-]"
_OTHER_KEYS: Final = (  # kind, hint, form
    ("api key", "tvly-", r"tvly-(?:[a-z]{2,5}-)?[A-Za-z0-9]{20,}+"),  # Tavily
    ("api key", "nvapi-", r"nvapi-[A-Za-z0-9_-]{50,}+"),  # NVIDIA
    ("api key", "lsv2_", r"lsv2_(?:pt|sk)_[a-f0-9]{32}_[a-f0-9]{10}"),  # LangSmith
    ("api key", "sk-lf-", rf"sk-lf-{_UUID_REGEX}"),  # Langfuse
    ("api key", "glc_", r"glc_[A-Za-z0-9+/=]{40,}+"),  # Grafana Cloud
    ("api key", "key-", r"key-[0-9a-f]{32}(?![A-Za-z0-9])"),  # Mailgun
    ("api key", "sk", r"SK[0-9a-f]{32}(?![A-Za-z0-9])"),  # Twilio
    ("api key", "-us", r"[0-9a-f]{32}-us[0-9]{1,2}(?![A-Za-z0-9])"),  # Mailchimp
    ("api key", "pat-", rf"pat-(?:na|eu)[0-9]-{_UUID_REGEX}"),  # HubSpot
    ("token", "glsa_", r"glsa_[A-Za-z0-9]{32}_[a-f0-9]{8}"),  # Grafana
    ("token", "pscale_", r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{30,}+"),  # PlanetScale
    ("token", "tskey-", r"tskey-[a-z]{3,10}-[A-Za-z0-9]{6,}+-[A-Za-z0-9]{16,}+"),  # Tailscale
    ("token", "nfp_", r"nfp_[A-Za-z0-9]{36,}+"),  # Netlify
    ("token", "figd_", r"figd_[A-Za-z0-9_-]{36,}+"),  # Figma
    ("token", "sq", r"sq[apu]_[0-9a-f]{40}(?![A-Za-z0-9])"),  # SonarQube
    ("token", "pul-", r"pul-[0-9a-f]{40}(?![A-Za-z0-9])"),  # Pulumi
    ("token", "bkua_", r"bkua_[0-9a-f]{40}(?![A-Za-z0-9])"),  # Buildkite
    ("token", "cfpat-", r"CFPAT-[A-Za-z0-9_-]{40,}+"),  # Contentful
    ("token", "atbb", r"ATBB[A-Za-z0-9]{28,}+"),  # Bitbucket
    ("token", "1//0", r"1//0[A-Za-z0-9_-]{40,}+"),  # refresh token of Google
    ("token", "ops_eyj", r"ops_eyJ[A-Za-z0-9_+/=-]{60,}+"),  # 1Password
    ("private key", "a3-", r"A3(?:-[A-Z0-9]{6}){2}(?:-[A-Z0-9]{5}){4}(?![A-Za-z0-9])"),  # 1Password
    ("token", "clojars_", r"CLOJARS_[0-9a-f]{60}(?![A-Za-z0-9])"),
    ("token", "duffel_", r"duffel_(?:live|test)_[A-Za-z0-9_-]{40,}+"),
    ("token", "akcp", r"AKCp[A-Za-z0-9]{60,}+"),  # JFrog
    ("token", "cmvmdgtu", r"cmVmdGtu[A-Za-z0-9+/=]{50,}+"),  # JFrog
    ("token", "pat", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}(?![A-Za-z0-9])"),  # Airtable
    ("token", "eaaa", r"EAAA[A-Za-z0-9_-]{60,}+"),  # Square
    ("token", ":apa91b", r"[A-Za-z0-9_-]{11}:APA91b[A-Za-z0-9_-]{100,}+"),  # Firebase
    ("token", "v1.0-", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{140,}+"),  # Cloudflare
    ("token", "sk.eyj", r"sk\.eyJ[A-Za-z0-9_-]{20,}+\.[A-Za-z0-9_-]{20,}+"),  # Mapbox
    ("token", ".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{60,}+"),  # Terraform
    # The client secret of Azure has these two characters at one place only.
    ("secret", "q~", r"[A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}(?![A-Za-z0-9_~-])"),
    # Encrypted JSON web token.
    (
        "token",
        "eyj",
        rf"eyJ[A-Za-z0-9_-]{{8,}}+\.{_JWE_PART}{{0,4096}}+(?:\.{_JWE_PART}{{8,}}+){{3}}",
    ),
)
_RANDOM_KEYS: Final = (  # the same for short prefixes; the key must look random
    ("api key", "fw_", r"fw_[A-Za-z0-9]{20,}+"),  # Fireworks
    ("token", "secret_", r"secret_[A-Za-z0-9]{43}(?![A-Za-z0-9_])"),  # Notion
    ("token", "cio", r"cio[A-Za-z0-9]{32}(?![A-Za-z0-9_-])"),  # crates.io
)

_KEY_PATTERNS: Final = (
    *(_key_pattern(*row) for row in _OTHER_KEYS),
    *(_key_pattern(*row, _is_random_key) for row in _RANDOM_KEYS),
    _key_pattern("api key", "sk-ant-", r"sk-ant-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("api key", "sk-", r"sk-(?:proj|svcacct|admin|or-v1)-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("api key", "sk-", r"sk-[A-Za-z0-9_-]{20,}+", _has_alphanumeric_run),
    _key_pattern("api key", "aiza", r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    _key_pattern("api key", "hf_", r"hf_[A-Za-z0-9]{30,}+"),
    _key_pattern("api key", "gsk_", r"gsk_[A-Za-z0-9]{40,}+"),
    _key_pattern("api key", "xai-", r"xai-[A-Za-z0-9]{40,}+"),
    _key_pattern("api key", "k_", r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}+"),
    _key_pattern("api key", "whsec_", r"whsec_[A-Za-z0-9+/=]{24,}+"),
    _key_pattern("api key", "sg.", r"SG\.[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),
    _key_pattern("access key", "ia", r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _key_pattern("private key", "age-secret-key-1", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}+"),
    _key_pattern("token", "gh", r"gh[pousr]_[A-Za-z0-9]{36,}+"),
    _key_pattern("token", "github_pat_", r"github_pat_[A-Za-z0-9_]{22,}+"),
    _key_pattern("token", "glpat-", r"glpat-[A-Za-z0-9_-]{20,}+"),
    # GitLab tokens must look random, because `glrt-` also occurs in texts on statistics.
    _key_pattern(
        "token",
        "glrt- gldt- glptt- glcbt- glft- glsoat- glimt- glagent-",
        r"gl(?:rt|dt|ptt|cbt|ft|soat|imt|agent)-[A-Za-z0-9_-]{20,}+",
        _is_random_key,
    ),
    _key_pattern("token", "shp", r"shp(?:at|ca|pa|ss)_[A-Za-z0-9]{32,}+"),  # Shopify
    _key_pattern("token", "dapi", r"dapi[a-f0-9]{32}(?:-[0-9]{1,2})?(?![A-Za-z0-9])"),  # Databricks
    # HashiCorp Vault
    _key_pattern("token", "hvs. hvb. hvr.", r"(?<!\.)hv[sbr]\.[A-Za-z0-9_-]{20,}+", _is_random_key),
    _key_pattern("token", "atatt3x", r"ATATT3x[A-Za-z0-9_=-]{20,}+"),  # Atlassian
    _key_pattern("api key", "pmak-", r"PMAK-[A-Za-z0-9]{20,}+(?:-[A-Za-z0-9]{20,}+)?"),  # Postman
    _key_pattern("token", "ntn_", r"ntn_[A-Za-z0-9]{30,}+"),  # Notion
    _key_pattern("api key", "lin_api_", r"lin_api_[A-Za-z0-9]{30,}+"),  # Linear
    _key_pattern("token", "sbp_", r"sbp_[A-Za-z0-9]{32,}+"),  # Supabase
    # Doppler
    _key_pattern("token", "dp.", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._-]{30,}+"),
    _key_pattern("api key", "pplx-", r"pplx-[A-Za-z0-9]{32,}+"),  # Perplexity
    _key_pattern("token", "r8_", r"r8_[A-Za-z0-9]{30,}+"),  # Replicate
    _key_pattern("token", "dckr_", r"dckr_[po]at_[A-Za-z0-9_-]{20,}+"),  # Docker
    _key_pattern("api key", "rubygems_", r"rubygems_[A-Za-z0-9]{40,}+"),
    _key_pattern("token", "sntry", r"sntry[su]_[A-Za-z0-9_+/=-]{40,}+"),  # Sentry
    _key_pattern("api key", "nrak-", r"NRAK-[A-Za-z0-9]{20,}+"),  # New Relic
    _key_pattern(  # Token of a Discord bot: id in base64, time, signature
        "token",
        ".",
        r"(?<!\.)[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}+",
        _is_random_key,
    ),
    _key_pattern(
        "token",
        "/api/webhooks/",
        r"discord(?:app)?\.com/api/webhooks/(?P<value>[0-9]{15,20}/[A-Za-z0-9_-]{30,}+)",
    ),
    _key_pattern(
        "token",
        "webhook.office.com",
        r"webhook\.office\.com/webhookb2/(?P<value>[A-Za-z0-9@/._-]{30,}+)",
    ),
    # Signatures and keys in addresses of Azure, Amazon and Google.
    _secret_pattern(
        "token",
        "sig= signature= security-token=",
        r"(?i)(?<=[?&;])(?:sig|(?:x-(?:amz|goog)-)?(?:signature|security-token))="
        r"(?P<value>[\w%+/=.~-]{20,}+)",
    ),
    _secret_pattern(
        "token",
        "code= key=",
        r"(?<=[?&;])(?:code|key)=(?P<value>[\w%+/=.~-]{20,}+)",
        _has_random_run,
    ),
    # The only name in an address, as in `https://TOKEN@host`.
    _secret_pattern("token", "://", r"://(?P<value>[\w.~+-]{20,256}+)@", _has_random_run),
    # These two patterns find the gateway's cookie and login links.
    _key_pattern("cookie", "steno", r"steno[a-z_-]{0,20}=(?P<value>[0-9]{6,20}\.[\w.-]{16,}+)"),
    _secret_pattern("token", "/login?code=", r"/login\?code=(?P<value>[\w.-]{8,}+)"),
    _key_pattern("token", "xox", r"xox[abcdeoprs]-[A-Za-z0-9-]{10,}+"),
    _key_pattern("token", "xapp-", r"xapp-[0-9]-[A-Za-z0-9-]{20,}+"),
    _key_pattern("token", "hooks.slack.com", r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}+"),
    _key_pattern("token", "ya29.", r"ya29\.[A-Za-z0-9_-]{20,}+"),
    _key_pattern("token", "gocspx-", r"GOCSPX-[A-Za-z0-9_-]{20,}+"),
    _key_pattern("token", "npm_", r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
    _key_pattern("token", "pypi-", r"pypi-[A-Za-z0-9_-]{50,}+"),
    _key_pattern("token", "dop_v1_", r"dop_v1_[0-9a-f]{64}(?![A-Za-z0-9])"),
    # Token of a Telegram bot. In URLs, the token follows the word `bot`.
    _key_pattern(
        "token", ":", r"(?:bot)?(?P<value>[0-9]{8,10}:[A-Za-z0-9_-]{35})(?![A-Za-z0-9_-])"
    ),
    # JSON web token: a header and a body that are both JSON objects.
    _key_pattern(
        "token", "eyj", r"eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{4,}+(?:\.[A-Za-z0-9_-]*+)?"
    ),
)

_COOKIE_IN_PROSE: Final = lazy_pattern(r"(?:<|[^\s=;]{1,64}=[^\s;]{1,7}[ \t])")


def _is_cookie(match: re.Match[str]) -> bool:
    """Return whether the text after `cookie:` is a cookie and not a short example in prose."""
    return _COOKIE_IN_PROSE.match(match["value"]) is None


def _is_url_password(match: re.Match[str]) -> bool:
    value = match["value"]
    is_placeholder = value.lower() in ("password", "pass", "pwd", "secret")
    return not (is_placeholder or _REFERENCE.match(value) or _PLACEHOLDER.fullmatch(value))


_HEADER_PATTERNS: Final = (
    _secret_pattern(
        "token",
        "bearer",
        r"(?i)\bbearer:?[ \t]{1,4}(?P<value>[\w.~+/=-]{16,}+)",
        _is_credential,
    ),
    _secret_pattern(
        "password",
        "basic",
        r"(?i)\bauthorization:[ \t]{0,4}basic[ \t]{1,4}(?P<value>[a-z0-9+/=]{8,}+)",
    ),
    _secret_pattern(
        "token",
        "authorization",
        r"(?i)\bauthorization:[ \t]{0,4}(?:token|apikey|key)[ \t]{1,4}"
        r"(?:token=)?[\"']?(?P<value>[\w.~+/=-]{8,}+)",
        _is_credential,
    ),
    _secret_pattern(
        "cookie",
        "set-cookie",
        r"(?i)(?<![\w-])set-cookie:[ \t]{0,4}[^\s=;,\"']{1,64}="
        r"(?P<value>(?!\[redacted)[^\s;,\"'\\]{1,4096}+)",
    ),
    _secret_pattern(
        "cookie",
        "cookie",
        r"(?i)(?<![\w-])cookie:[ \t]{0,4}(?P<value>[^\s=;,\"']{1,64}=(?!\[redacted)[^\s\"'\\]"
        r"[^\r\n\"'\\]{0,4096}+)",
        _is_cookie,
    ),
    # This pattern finds the password in a URL: scheme://user:password@host.
    # The password may contain an @ or a slash, so it extends to the last @.
    # Text that starts with a port number is not a password.
    _secret_pattern(
        "password",
        "://",
        r"://[^\s/:@\[]{0,64}+:(?P<value>(?!\[redacted|[0-9]{1,5}(?:[/?#]|\Z))\S{1,256})@",
        _is_url_password,
    ),
)

_OPTION_VALUE_REGEX: Final = (
    r"(?:(?P<quote>[\"'])(?P<quoted>[^\"'\n]{1,256})(?P=quote)|(?P<value>[^\s\"'`\\]{3,1024}+))"
)


def _is_option_value(match: re.Match[str]) -> bool:
    """Return whether the text after an option is its value and not the rest of a sentence."""
    value = match["quoted"] or match["value"].rstrip(".,;:!?)]}")
    if value.startswith("-") or _PLACEHOLDER.match(value) or value.startswith("$"):
        return False
    letters = value.replace("_", "").replace("-", "")
    return not (letters.isalpha() and (letters.islower() or letters.isupper()))


def _is_attached_password(match: re.Match[str]) -> bool:
    """Return whether the text directly after `-p` is a password and not a placeholder."""
    value = match["quoted"] or match["value"]
    return not (_PLACEHOLDER.match(value) or value[0] in "$%<-" or value.isupper())


def _is_in_curl_command(match: re.Match[str]) -> bool:
    text_before = match.string[max(0, match.start() - 300) : match.start()]
    return "curl" in text_before.rpartition("\n\n")[2]


def _is_curl_password(match: re.Match[str]) -> bool:
    return _is_in_curl_command(match) and not _PLACEHOLDER.match(match["value"])


def _is_curl_cookie(match: re.Match[str]) -> bool:
    value = (match["quoted"] or match["value"]).partition("=")[2]
    is_reference = _PLACEHOLDER.match(value) or _REFERENCE.match(value)
    return _is_in_curl_command(match) and len(value) > 7 and not is_reference


_REGISTRY_COMMAND: Final = lazy_pattern(r"\b(?:az|buildah|docker|helm|nerdctl|oc|podman|skopeo)\b")


def _is_registry_password(match: re.Match[str]) -> bool:
    """Return whether the text after `login … -p` is the password of a registry or a cloud."""
    text_before = match.string[max(0, match.start() - 80) : match.start()].rpartition("\n")[2]
    return _REGISTRY_COMMAND.search(text_before) is not None and _is_option_value(match)


def _is_quoted_password(match: re.Match[str]) -> bool:
    """Return whether a quoted text is a password and not a placeholder."""
    value = match["quoted"]
    is_placeholder = value.lower() in _PLACEHOLDERS
    return not (is_placeholder or _PLACEHOLDER.match(value) or _REFERENCE.match(value))


_COMMAND_PATTERNS: Final = (
    _secret_pattern(
        "secret",
        "--",
        r"(?i)(?<![\w-])--(?:[a-z]{1,20}-){0,3}(?:password|passwd|passphrase|token|secret"
        rf"|(?:api|access|secret)-?key)[ \t]{{1,4}}{_OPTION_VALUE_REGEX}",
        _is_option_value,
    ),
    _secret_pattern(
        "password",
        "sshpass",
        rf"\bsshpass[ \t]{{1,4}}-p[ \t]{{0,4}}{_OPTION_VALUE_REGEX}",
        _is_option_value,
    ),
    _secret_pattern(
        "password",
        "mysql",
        rf"\bmysql[a-z]{{0,8}}\b[^\n|;&]{{0,200}}?[ \t]-p{_OPTION_VALUE_REGEX}",
        _is_attached_password,
    ),
    _secret_pattern(
        "password",
        "curl",
        r"(?<![\w-])(?:-u|--user)[ \t=]{0,4}[\"']?[^\s:\"'/]{1,64}:"
        r"(?P<value>[^\s\"'`\\]{1,256}+)",
        _is_curl_password,
    ),
    _secret_pattern(
        "cookie",
        "curl",
        r"(?<![\w-])(?:-b|--cookie)[ \t=]{1,4}(?:(?P<quote>[\"'])"
        r"(?P<quoted>[^\s=;\"']{1,64}=[^\"'\n]{1,4096}+)(?P=quote)"
        r"|(?P<value>[^\s=;\"']{1,64}=[^\s\"'`]{1,4096}+))",
        _is_curl_cookie,
    ),
    _secret_pattern(
        "password",
        "login",
        rf"\blogin\b[^\n|;&]{{0,200}}?[ \t]-p[ \t]{{1,4}}{_OPTION_VALUE_REGEX}",
        _is_registry_password,
    ),
    _secret_pattern(
        "password",
        "redis-cli",
        rf"\bredis-cli\b[^\n|;&]{{0,200}}?[ \t]-a[ \t]{{1,4}}{_OPTION_VALUE_REGEX}",
        _is_option_value,
    ),
    _secret_pattern(
        "password",
        "pass:",
        r"(?<![\w-])-(?:pass|passin|passout)[ \t]{1,4}[\"']?pass:"
        r"(?P<value>(?![$<\[])[^\s\"'`\\]{1,256}+)",
    ),
    _secret_pattern(
        "password",
        "identified password",
        r"(?i)\b(?:identified\s{1,4}(?:with\s{1,4}[\"'`\w]{1,40}\s{1,4})?by(?:\s{1,4}password)?"
        r"|(?:with|encrypted|login)\s{1,4}password)\s{1,4}"
        r"(?P<quote>[\"'])(?P<quoted>[^\"'\n]{3,256})(?P=quote)",
        _is_quoted_password,
    ),
    _secret_pattern(
        "password",
        "login",
        r"\bmachine\s{1,8}\S{1,128}+\s{1,8}login\s{1,8}\S{1,128}+"
        r"\s{1,8}password\s{1,8}(?P<value>(?!\[redacted)\S{1,256}+)",
    ),
    _secret_pattern(
        "access key",
        "accountkey= sharedaccesskey=",
        r"(?i)\b(?:account|sharedaccess)key=(?P<value>[a-z0-9+/=]{20,}+)",
    ),
)

_XML_ELEMENT: Final = lazy_pattern(
    r"<(?P<tag>[\w:.-]{1,64})(?:\s[^<>]{0,200})?>(?P<value>[^<>]{1,256})</(?P=tag)\s{0,4}>"
)


def _is_secret_element(match: re.Match[str]) -> bool:
    kind, value = secret_kind(match["tag"]), match["value"]
    is_word = value.isalpha() and len(value) < 16 and kind is not None and kind.name != "password"
    return kind is not None and not is_word and is_secret_value(kind, value)


# --- secrets introduced by words -------------------------------------------------------------

_VALUE_REGEX: Final = (
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\n]{1,256})(?P=quote)|(?P<bare>\S{1,256}+))"
)

_PASSWORD: Final = lazy_pattern(
    r"(?i)(?:password|passwd|passphrase|passcode|pwd)"
    r"(?:(?<!redacted: password)\]|%5d|\*\*|__)?(?P<closed>[\"'`]?)"
    r"(?:\s{1,4}(?:for|of|on|to)(?:\s{1,4}[\w'.-]{1,24}){1,4}?)?"
    r"(?P<sep>\s{0,4}(?:=>|:=|=|:|\uff1a)(?:\*\*|__)?\s{0,4}"
    r"|\s{1,4}(?:is|was|to)(?:\s{1,4}now)?(?:\s{0,4}:\s{0,4}|\s{1,4}))"
    rf"{_VALUE_REGEX}(?P<next>[ \t]{{0,4}}\w{{0,4}})"
)
# This pattern takes most of the search time, so it starts with the possible first letters.
_ASSIGNED_SECRET: Final = lazy_pattern(
    r"[sSkKtTpPcCmMпП密パ](?i:(?P<secret>(?<=s)ecret(?:_key_base)?)|(?P<key>(?<=k)ey)|(?P<token>(?<=t)oken)"
    r"|(?P<password>(?<=p)asswort|(?<=k)ennwort|(?<=c)ontrase[nñ]a|(?<=m)ot de passe|(?<=s)enha"
    r"|(?<=п)ароль|(?<=密)码|(?<=パ)スワード)"
    r")[\"'`]?(?P<sep>\s{0,4}(?:=>|:=|=|:|\uff1a)(?:\*\*|__)?\s{0,4}|\s{1,4}(?i:is|ist|lautet|es|est)\s{1,4})"
    rf"{_VALUE_REGEX}"
)
_ASSIGNED_HINTS: Final = (
    *("secret", "key", "token", "passwort", "kennwort", "contrase", "mot de passe", "senha"),
    *("пароль", "密码", "パスワード"),
)
_KEY_PREFIX: Final = lazy_pattern(
    r"(?i)(?:api|access|private|secret|signing|encryption|fernet|master|hmac|jwt|aes)[_ -]?\Z"
)
_TOKEN_PREFIX: Final = lazy_pattern(r"(?i)(?:access|auth|refresh|api|bot|session|id)[_ -]?\Z")
_PIN: Final = lazy_pattern(
    r"(?i)(?<![^\W_])pin(?:[ _-](?:code|number))?[\"'`]?"
    r"(?:\s{0,4}[=:](?:\*\*|__)?\s{0,4}|\s{1,4}is(?:\s{0,4}:\s{0,4}|\s{1,4}))[\"'`]?(?P<value>[0-9]{4,8})\b"
)

_CONNECTOR_WORD: Final = lazy_pattern(
    r"(?i)\b(?:gpio|board|bcm|analog|digital|output|input|data|clock|led|header)[ _-]?\Z"
)
"""Pattern of words before `pin` that mean the pin of a connector."""


def _is_pin(match: re.Match[str]) -> bool:
    text_before = match.string[max(0, match.start() - 12) : match.start()]
    return _CONNECTOR_WORD.search(text_before) is None


_ASSIGNMENT_SIGNS: Final = ("=", ":", ":=", "=>")

_PLACEHOLDER: Final = lazy_pattern(
    # This pattern finds placeholders and references in place of a secret.
    r"(?i)\[(?:redacted|hidden|removed|masked|filtered|your|\.)|\*\*|••|\.\.\.|…|<[^<>\s]{1,40}>|<your\b"
    r"|\{|%[(sd]|\$[{(]|\$[A-Z_]{0,30}(?:pass|pwd|secret|token|key)|\([a-z]{1,30}\b|x{3,}\b|your[_-]"
    r"|os\.|env[.\[]|process\.|config[.\[]|settings\.|self\.|[\w.]{1,60}\(|[a-z_][\w.]{0,60}\["
)
_NUMBER_PATTERN: Final = lazy_pattern(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,4})?")
_PLACEHOLDER_WORDS: Final = """
    any bool boolean bytes changeme char false int nil none null number object optional passwd
    password pwd secret secretstr str string string? text true undefined varchar
"""
_PLACEHOLDERS: Final = frozenset(_PLACEHOLDER_WORDS.split())

_SENTENCE_WORD_LIST: Final = """
    a about again all also always an another any as at bad based been being but by case-sensitive
    complex correct different easy empty enough fine for from good gone hard here hers his
    important impossible in incorrect invalid it its just kept known less long lost mandatory mine
    missing more my necessary never new no none not now of off ok okay old on one only optional or
    our out over password passwords private public quite rather really required right safe same
    secret secure set short simple so something sound still strong sure temporary that the their
    theirs there this to too unique unknown unsafe up valid very weak what where which with without
    wrong your yours
"""
_SENTENCE_WORDS: Final = frozenset(_SENTENCE_WORD_LIST.split())
"""Words that often follow `password is` in ordinary sentences."""


_PASSWORD_VARIABLE: Final = lazy_pattern(
    r"(?i)[a-z_]\w{0,40}[._](?:\w{1,40}\.)?\w{0,40}(?:passw(?:or)?d|passphrase|pwd)"
)
"""Pattern of variables and fields in programs, as in `password=user_password`."""
_PASSWORD_LABEL: Final = lazy_pattern(
    r"(?i)[^\W\d_][^\d]{0,30}\s[^\d]{0,30}(?:passwor[dt]|kennwort)[^\d]{0,30}"
    r"|(?:passwor[dt]|kennwort)\s[^\d]{1,60}"
)
"""Pattern of labels and messages about passwords, such as `Enter your password`."""


def _is_password(match: re.Match[str]) -> bool:
    """Return whether the text after `password` is a password and not the rest of the sentence."""
    value = _value_text(match)
    if len(value) < 3 or _PLACEHOLDER.match(value) or value.lower() in _PLACEHOLDERS:
        return False
    if match["closed"] and _NUMBER_PATTERN.fullmatch(value):
        return False  # find_secret_fields has checked numbers after quoted field names
    if match["quoted"] is not None:
        is_label = _PASSWORD_LABEL.fullmatch(value) is not None
        has_sign = any(sign in match["sep"] for sign in ("=", ":", "\uff1a"))
        return not is_label and (has_sign or value.lower() not in _SENTENCE_WORDS)
    if _PASSWORD_VARIABLE.fullmatch(value):
        return False
    if "=" in match["sep"]:
        return True
    if not value.isalpha() and value.lower() not in _SENTENCE_WORDS:
        return "to" not in match["sep"].lower() or any(map(str.isdigit, value))
    word, next_word = value.lower(), match["next"].strip().lower()
    ends_clause = match["bare"][-1] in ".,;!?)" or next_word in ("", "and", "but")
    is_sentence_word = word in _SENTENCE_WORDS or word.endswith(("ed", "ing", "en", "ly"))
    return (
        ends_clause
        and not is_sentence_word
        and "password" not in word
        and "to" not in match["sep"].lower()
    )


def _is_assigned_secret(match: re.Match[str]) -> bool:
    """Return whether the text after `api key` or similar words is a key: long, and not a word."""
    text_before = match.string[max(0, match.start() - 12) : match.start()]
    if match["key"] and not _KEY_PREFIX.search(text_before):
        return False
    if match["token"] and not _TOKEN_PREFIX.search(text_before):
        is_separate_word = not text_before[-1:].isascii() or not text_before[-1:].isalnum()
        if not is_separate_word or match["sep"].strip()[:1] not in ("=", ":"):
            return False
        # Pagination tokens, such as `next_token`, are no secrets.
        name_start = match.string[max(0, match.start() - 24) : match.start()]
        if secret_kind(f"{_LAST_WORD.findall(name_start)[0]}_token") is None:
            return False
    value = _value_text(match)
    if len(value) < (4 if match["password"] else 8) or _PLACEHOLDER.match(value):
        return False
    if match["bare"] and (_REFERENCE.match(value) or (not match["password"] and _is_name(value))):
        return False
    may_be_type = match["token"] and match["bare"] and ":" in match["sep"] and len(value) < 16
    if may_be_type and _IDENTIFIER.fullmatch(value) and not _looks_random(value):
        return False  # as in `token: Base64Url`
    if any(map(str.isdigit, value)):
        return any(map(str.isalpha, value))
    return match["sep"].strip() in _ASSIGNMENT_SIGNS and _ALPHANUMERIC_RUN.search(value) is not None


def _value_text(match: re.Match[str]) -> str:
    return match["quoted"] or match["bare"].strip("\"'`").rstrip(".,;:!?)]}")


# --- unquoted field names ----------------------------------------------------------------------
# Assignments in the environment, in commands and in configuration files: the name says the kind.


_FIELD_HINTS: Final = (
    *("pass", "pw", "auth", "cred", "secret", "token", "key", "cookie", "jwt", "sess", "bearer"),
)
_NAME_IN_CAPITALS: Final = lazy_pattern(
    rf"(?<![\w$%.-])(?P<name>[A-Z_][A-Z0-9_]{{1,63}}+)={_VALUE_REGEX}"
)
"""Pattern of a variable of the environment."""
_DOCKER_VARIABLE: Final = lazy_pattern(
    r"(?m)^[ \t]{0,80}ENV[ \t]{1,8}(?P<name>[A-Z_][A-Z0-9_]{1,63}+)[ \t]{1,8}"
    rf"{_VALUE_REGEX}(?=[ \t\r]{{0,8}}$)"
)
"""Pattern of a variable of the environment in a Dockerfile, where it may have no `=`."""
_PASSPHRASE_IN_LINE: Final = lazy_pattern(
    r"(?im)^[ \t]{0,80}(?:export )?[a-z_]{0,40}passphrase[ \t]{0,8}=[ \t]{0,8}"
    r"(?P<value>[a-z]{2,20}(?: [a-z]{2,20}){2,12})[ \t\r]{0,8}$"
)
_LOGIN_VARIABLE: Final = lazy_pattern(r"[A-Z0-9_]{1,60}_(?:PASS|PW|AUTH|CREDS?)[0-9]?")
"""Pattern of variables that contain a password, whatever the words before."""
_NAME_BEFORE_QUOTE: Final = lazy_pattern(
    r"(?<![\w$-])(?P<name>[A-Za-z_][\w-]{1,63}+)[ \t]{0,4}(?:=>|:=|=|:)[ \t]{0,4}"
    r"(?P<quote>[\"'`])(?P<quoted>[^\s\"'`]{4,256}+)(?P=quote)"
)
_NAME_IN_LINE: Final = lazy_pattern(
    # at the start of a line, or of an item in braces
    r"(?m)(?:^[ \t]{0,80}(?:- |export |set |//[\w.:/-]{1,128}:)?|[{,][ \t]{1,4})"
    r"(?P<name>[A-Za-z_][\w.-]{1,63}+)(?P<sep>[ \t]{0,8}[:=][ \t]{0,8})"
    r"(?P<bare>[^\s\"'`{}()\[\],;|>]{4,1024}+)(?=[ \t\r]{0,8}(?:$|[,;}]|[ \t]#))"
)
_XML_ATTRIBUTES: Final = lazy_pattern(
    r"(?i)\b(?:key|name)\s{0,4}=\s{0,4}[\"'](?P<name>[\w.:-]{1,64}+)[\"']\s{1,8}value\s{0,4}=\s{0,4}"
    r"(?P<quote>[\"'])(?P<quoted>[^\"'<>\n]{3,512}+)(?P=quote)"
)
_SETTER: Final = lazy_pattern(
    r"\b(?:[sS]et|[wW]ith)_?(?P<name>(?i:pass(?:word|wd|phrase)|(?:api|access|secret)_?key"
    r"|(?:client_?)?secret|(?:auth_?|access_?)?token))\(\s{0,4}"
    r"(?P<quote>[\"'])(?P<quoted>[^\s\"']{4,256}+)(?P=quote)\s{0,4}\)"
)
_LAST_WORD: Final = lazy_pattern(r"[\w-]*\Z")
_IDENTIFIER: Final = lazy_pattern(r"[A-Za-z_$][\w$]*+(?:\.[A-Za-z_$][\w$]*+)*+")
_REFERENCE: Final = lazy_pattern(
    # variables, anchors, paths, addresses, calls
    r"[$%{<][\w$%{(<]|[*&!][A-Za-z_]\w{0,40}\Z|(?:~|\.{1,2})?/(?:[a-z0-9_.-]{1,40}/)++[\w.-]{0,60}\Z"
    r"|(?:~|\.{1,2})/|[A-Za-z]:[\\/]|[a-z][a-z0-9+.-]{1,20}://|:[a-z_]{1,40}\Z"
    # times and versions
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}(?!\w)|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]|v?[0-9]{1,4}(?:\.[0-9]{1,4}){1,3}\Z"
)
_PLACEHOLDER_PART_LIST: Final = """
    placeholder replace replaced change changeme example sample dummy todo fixme insert enter here
    your yours my this value none null nil true false undefined required optional default test
    password passwd passphrase pass secret secrets token key auth credentials xxx xxxx foo bar baz
    yes no on off enabled disabled string
"""
_PLACEHOLDER_PARTS: Final = frozenset(_PLACEHOLDER_PART_LIST.split())
"""Words of texts such as `your-secret-here` and `change_me`, and of names of secrets."""
_SIGNING_SECRET: Final = lazy_pattern(
    r"(?:.*[_.-])?(?:jwt|session|cookie|csrf|hmac|signing|webhook)[_.-]?secret(?:[_.-]key)?"
)
"""Pattern of names of secrets that sign something, and are no names of stored secrets."""
_WORDS: Final = lazy_pattern("[A-Za-z]+")
_PASSPHRASE: Final = lazy_pattern(
    r"[A-Za-z]{3,20}(?:[-_.][A-Za-z]{3,20}){2,12}(?:[-_.]?[0-9]{1,6})?"
)
_NAME_WITH_NUMBER: Final = lazy_pattern(r"(?=.*[0-9])[a-z0-9]{1,12}(?:[-_./][a-z0-9]{1,16}){1,12}")


def _is_name(value: str) -> bool:
    """Return whether the text is the name of something, such as `db-credentials-v2`."""
    is_name = _NAME_WITH_NUMBER.fullmatch(value) and not _PASSPHRASE.fullmatch(value)
    return bool(is_name) and not _looks_random(value)


def _is_field_of(kind: SecretKind | None, value: str) -> bool:
    """Return whether a text in a field of this kind is no reference and no placeholder."""
    if kind is None or len(value) < (4 if kind.name == "password" else 8):
        return False
    if _PLACEHOLDER.match(value) or _REFERENCE.match(value) or "..." in value or "(" in value:
        return False
    if not is_secret_value(kind, value) or _NUMBER_PATTERN.fullmatch(value):
        return False
    if _looks_random(value):
        return True
    if kind.name != "password" and _is_name(value):
        return False
    words = [word.lower() for word in _WORDS.findall(value)]
    if not words or not _PLACEHOLDER_PARTS.isdisjoint(words):
        return False
    if kind.name == "password" or any(map(str.isdigit, value)):
        return True
    return _ALPHANUMERIC_RUN.search(value) is not None or _PASSPHRASE.fullmatch(value) is not None


def _is_variable(match: re.Match[str]) -> bool:
    kind = secret_kind(match["name"])
    if kind is None and _LOGIN_VARIABLE.fullmatch(match["name"]):
        kind = secret_kind("password")
    return _is_field_of(kind, _value_text(match))


def _is_named_literal(match: re.Match[str]) -> bool:
    return _is_field_of(secret_kind(match["name"]), match["quoted"])


def _is_quoted_field(match: re.Match[str]) -> bool:
    """Return whether a quoted text after an unquoted name is a secret and not a word."""
    return any(map(str.isdigit, match["quoted"])) and _is_named_literal(match)


def _has_passphrase(match: re.Match[str], kind: SecretKind | None) -> bool:
    """Return whether words in a field are a secret, unlike in `secret: wildcard-certificate`."""
    name = _CAMEL_CASE.sub("_", match["name"]).lower()
    if kind is not None and kind.name == "password":
        return name != "pass" or "=" in match["sep"]
    return _SIGNING_SECRET.fullmatch(name) is not None


def _is_line_field(match: re.Match[str]) -> bool:
    """Return whether a line of a configuration file has a secret, and not an expression or type."""
    kind, value = secret_kind(match["name"]), match["bare"].rstrip(".,;:")
    if not _is_field_of(kind, value):
        return False
    if not any(map(str.isdigit, value)):
        is_passphrase = "-" in value and _PASSPHRASE.fullmatch(value) is not None
        return is_passphrase and _has_passphrase(match, kind)  # guard: words-redacted
    if not _IDENTIFIER.fullmatch(value) or _looks_random(value):
        return True
    # The value may be a variable or a type: only simple settings are secrets.
    if match["name"].isupper():
        return True
    is_argument = match.string[match.end() : match.end() + 1] == ","
    # Types begin with a capital, but the names of their fields seldom say what password it is.
    may_be_type = not value.islower() and "_" not in match["name"]
    has_sign_of_setting = match["sep"] == "=" or (match["sep"] == ": " and not may_be_type)
    is_password = kind is not None and kind.name == "password" and len(value) > 5
    return is_password and has_sign_of_setting and not is_argument


# --- card numbers ----------------------------------------------------------------------------

_CARD_SEPARATOR_REGEX: Final = "[ \u00a0\u2009\u202f]{1,2}|[-.\u2010-\u2015]"
"""Separators between the groups of a card number: spaces, hyphens, dashes or dots."""
_CARD_NUMBER: Final = lazy_pattern(
    rf"(?<![\w+-])(?<![0-9]\.)(?:[0-9]{{14,19}}|[0-9]{{4}}({_CARD_SEPARATOR_REGEX})[0-9]{{4}}\1[0-9]{{4}}\1[0-9]{{4}}"
    rf"|3[0-9]{{3}}({_CARD_SEPARATOR_REGEX})[0-9]{{6}}\2[0-9]{{4,5}})(?!\w|\.[0-9]|-\w)"
)
_ISSUED_CARD_NUMBER: Final = lazy_pattern(
    r"4[0-9]{15}|(?:5[1-5]|2[2-7])[0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[68][0-9])[0-9]{11}"
    r"|(?:35|65|62)[0-9]{14}|6(?:011|4[4-9][0-9])[0-9]{12}|62[0-9]{17}"
)


def _is_card_number(match: re.Match[str]) -> bool:
    """Return whether a card issuer uses such numbers and the check digit (Luhn) is correct."""
    digits = re.sub("[^0-9]", "", match[0])
    if not _ISSUED_CARD_NUMBER.fullmatch(digits):
        return False
    luhn_values = [int(digit) * (2 if i % 2 else 1) for i, digit in enumerate(reversed(digits))]
    return sum(value - 9 * (value > 9) for value in luhn_values) % 10 == 0


SECRET_PATTERNS: Final = (  # guard: keys-redacted
    PRIVATE_KEY,
    _PUTTY_KEY,
    *_KEY_PATTERNS,
    *_HEADER_PATTERNS,
    *_COMMAND_PATTERNS,
    SecretPattern("secret", _XML_ELEMENT, ("</",), _is_secret_element),
    SecretPattern("secret", _ASSIGNED_SECRET, _ASSIGNED_HINTS, _is_assigned_secret),
    SecretPattern("pin", _PIN, ("pin",), _is_pin),
    SecretPattern("card number", _CARD_NUMBER, tuple("3456"), _is_card_number),
    SecretPattern("password", _PASSPHRASE_IN_LINE, ("passphrase",)),  # guard: passphrase-whole
    # The check of passwords reads the text after the match, which may be another secret.
    SecretPattern("password", _PASSWORD, ("pass", "pwd"), _is_password),
    SecretPattern("secret", _NAME_IN_CAPITALS, _FIELD_HINTS, _is_variable),
    SecretPattern("secret", _DOCKER_VARIABLE, _FIELD_HINTS, _is_variable),  # guard: docker-redacted
    SecretPattern("secret", _NAME_IN_LINE, _FIELD_HINTS, _is_line_field),
    SecretPattern("secret", _NAME_BEFORE_QUOTE, _FIELD_HINTS, _is_quoted_field),
    SecretPattern("secret", _XML_ATTRIBUTES, ("value",), _is_named_literal),
    SecretPattern("secret", _SETTER, _FIELD_HINTS, _is_named_literal),
)
"""All kinds of secrets in search order, the most specific first."""
