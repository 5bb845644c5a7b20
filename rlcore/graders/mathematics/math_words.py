"""Words of mathematical answers: functions, symbols, units with their factors, and phrases."""

from __future__ import annotations

from fractions import Fraction


def words(text: str) -> list[str]:
    """Words that spaces part."""
    return text.split()


FUNCTIONS = frozenset(
    words(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt abs "
        "floor ceil gcd lcm min max factorial asin acos atan"
    )
)
LETTERS = words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega"
)
GREEK = {
    **{name: name for name in LETTERS},
    **{name.title(): name.title() for name in LETTERS},
    **{f"var{name}": name for name in LETTERS},
    "ell": "ell",
    "hbar": "hbar",
}
MATH_WORDS = {
    **{name: name for name in LETTERS},
    "infty": "infty",
    "inf": "infty",
    "infinity": "infty",
    "oo": "infty",
}
NUMBER_WORDS = {
    word: value
    for value, word in enumerate(
        words(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
            "fifteen sixteen seventeen eighteen nineteen twenty"
        )
    )
} | {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}
# Words that are operators, as (kind, text) of tokens.
WORD_TOKENS: dict[str, tuple[tuple[str, str], ...]] = {
    "and": (("op", "and"),),
    "or": (("op", "or"),),
    "to": (("op", ":"),),
    "per": (("op", "/"),),
    "squared": (("op", "^"), ("num", "2")),
    "cubed": (("op", "^"), ("num", "3")),
    "percent": (("op", "\\%"),),
    "percentage": (("op", "\\%"),),
    "pct": (("op", "\\%"),),
    "degree": (("op", "\\degree"),),
    "degrees": (("op", "\\degree"),),
    "deg": (("op", "\\degree"),),
    "infinity": (("let", "infty"),),
    "pi": (("let", "pi"),),
    "union": (("op", "\\cup"),),
    "minus": (("op", "-"),),
    "plus": (("op", "+"),),
    "times": (("op", "*"),),
    "thousand": (("op", "*"), ("num", "1000")),
    "million": (("op", "*"), ("num", "1000000")),
    "billion": (("op", "*"), ("num", "1000000000")),
    "trillion": (("op", "*"), ("num", "1000000000000")),
}
SHORT_WORDS = frozenset(
    words("is are the all odd yes no not mod rem off rad if sq ways the usd eur")
)
CURRENCIES = frozenset(words("$ usd eur euro sterling yen rupee"))
LEADING_WORDS = frozenset(
    words(
        "the answer is are final equals therefore so thus hence we get total of value be a an "
        "approximately about result solution solutions"
    )
)
# Words that change what a number beside them means: such an answer is compared as text.
REFUSED_WORDS = frozenset(
    words(
        """not no none except without other less more least most fewer greater than between half
        dozen hundred mod modulo remainder rem all every each from if when where until only
        undefined either neither nor odd even prime multiple multiples power before after past
        o'clock"""
    )
)


# Dimension, then words with the factor to the dimension's own unit.
_UNITS = """
length m=1 meter=1 metre=1 cm=1/100 centimeter=1/100 centimetre=1/100 mm=1/1000 millimeter=1/1000
length millimetre=1/1000 km=1000 kilometer=1000 kilometre=1000 in=127/5000 inch=127/5000
length inches=127/5000 ft=381/1250 foot=381/1250 feet=381/1250 yd=1143/1250 yard=1143/1250
length mi=201168/125 mile=201168/125 dm=1/10
time s=1 sec=1 second=1 min=60 minute=60 h=3600 hr=3600 hour=3600 day=86400 week=604800
month month=1 year=12 yr=12
mass g=1 gram=1 kg=1000 kilogram=1000 mg=1/1000 milligram=1/1000 lb=45359237/100000
mass pound=45359237/100000 oz=45359237/1600000 ounce=45359237/1600000 ton=907184
volume L=1 l=1 liter=1 litre=1 ml=1/1000 mL=1/1000 milliliter=1/1000 millilitre=1/1000
gallon gallon=1 gal=1 quart=1/4 pint=1/8 cup=1/16
dollar $=1 dollar=1 usd=1 cent=1/100 penny=1/100 pennies=1/100 nickel=1/20
euro euro=1 eur=1
sterling sterling=1
yen yen=1
rupee rupee=1
angle degree=1 radian=1 rad=1
celsius celsius=1
fahrenheit fahrenheit=1
percent %=1/100
morning am=1
evening pm=1
newton N=1 newton=1
joule J=1 joule=1
watt W=1 watt=1 kW=1000
"""
UNITS: dict[str, tuple[str, Fraction]] = {}
for _line in _UNITS.split("\n"):
    _dimension, *_words = _line.split() or [""]
    for _word in _words:
        _name, _, _factor = _word.rpartition("=")
        UNITS[_name] = (_dimension, Fraction(_factor))


RATES = {"mph": ("mile", "hour"), "kph": ("km", "hour"), "kmh": ("km", "hour")}


def unit(word: str) -> tuple[str, Fraction] | None:
    """(dimension, factor) of a unit's word, singular or plural; None for other words."""
    for form in (word, word.lower(), word.lower().removesuffix("s")):
        if form in UNITS and (len(word) > 1 or form == word):
            return UNITS[form]
    return None
