"""Texts that a model may emit and that must never act on what shows them."""

_CALL = "window.executed=1"
_MARKUP = (
    f"<script>{_CALL}</script>",
    f"</script><script>{_CALL}</script>",
    f"<img src=x onerror={_CALL}>",
    f"<svg onload={_CALL}>",
    f"<svg><script>{_CALL}</script></svg>",
    f"<body onload={_CALL}>",
    f"<iframe srcdoc='<script>parent.{_CALL}</script>'>",
    f"<a href=javascript:{_CALL}>x</a>",
    f"<details open ontoggle={_CALL}>",
    f"<input autofocus onfocus={_CALL}>",
    f"<video><source onerror={_CALL}></video>",
    f"<math><mtext><img src=x onerror={_CALL}>",
    f"<style>@import 'http://evil.example/x.css'</style><b onclick={_CALL}>",
    f"<link rel=stylesheet href=http://evil.example/x onerror={_CALL}>",
    f"<object data=javascript:{_CALL}>",
    f"<form action=javascript:{_CALL}><button>",
    f"<base href=http://evil.example/><img src=x onerror={_CALL}>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
)
_BREAKOUTS = ("", '"', "'", "`", "-->", "]]>", "</style>", "</title>", "</textarea>", "&quot;", "\\u0022", "\\", "*/")
_CODE = (f"${{{_CALL}}}", f"{{{{{_CALL}}}}}", f"javascript:{_CALL}", f"';{_CALL}//", f'";{_CALL}//', f"`;{_CALL}//")
_BIDI = tuple(map(chr, (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0x061C, 0xFEFF)))
_CONTROLS = tuple(chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\t\n\r")
_TERMINAL = ("\x1b[2J", "\x1b[31mred", "\x1b]0;title\x07", "\x1b]8;;http://evil.example\x07link", "\x9b5m")
_FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("http://evil.example")')
_ODD = (
    " ",
    "\n",
    "\t",
    "\r\n",
    "·",
    "\u0301",
    "a\u0301",
    "שלום",
    "\u2028",
    "\u2029",
    "\U000e0041",
    "\ufffe",
    "\U0010ffff",
)
_LONG = ("<b>" * 400_000, "\u202e" * 1_000_000)

HOSTILE = tuple(
    dict.fromkeys(
        [
            *(start + markup for start in _BREAKOUTS for markup in _MARKUP),
            *_CODE,
            *_CONTROLS,
            *(f"x{mark}y" for mark in _BIDI),
            *_TERMINAL,
            *_FORMULAS,
            *_ODD,
            *_LONG,
        ]
    )
)
SURROGATES = ("\ud800", "\udfff<img src=x onerror=window.executed=1>")
"""What no tokenizer's file can hold, but a record written by hand can."""
