"""Words that stand in almost every message and tell nothing about it: English and German ones."""

from typing import Final

_LISTED: Final = """
    a about again all also although am an and any anybody anyone anything are aren as at be because
    been being both but by can cannot could couldn did didn do does doesn doing don done each
    either else ever every for from get gets getting got had hadn has hasn have haven having he
    hello her here hers herself hey hi him himself his how however i if in into is isn it its
    itself just let ll lot m maybe me mine more most much must my myself neither no nor not now of
    off oh ok okay on once only or other our ours ourselves out over own please quite rather re
    really s shall she should shouldn since so some somebody someone something somewhat still such
    sure t than thank thanks that the their theirs them themselves then there these they thing
    things this those though through to too under until up us ve very was wasn we well were weren
    what whatever when where whether which while who whom whose why will with within without won
    would wouldn yeah yes yet you your yours yourself
    aber alle als also am an auch auf aus bei bin bis bist da damit dann das dass dein deine dem
    den denn der des dich die dies diese dieser dieses dir doch du durch ein eine einem einen einer
    eines er es etwas euch euer fur hab habe haben hat hatte hier ich ihm ihn ihr ihre im in ist ja
    jede jeder jedes kann kein keine mal man mehr mein meine mich mir mit nach nein nicht noch nun
    nur ob oder ohne sein seine sich sie sind so und uns unser unter vom von vor war waren warum
    was weil wenn wer werden wie wieder wir wird wo wurde zu zum zur uber
"""

STOP_WORDS: Final = frozenset(_LISTED.split())
"""In the form of tokens: small letters, without accents."""
