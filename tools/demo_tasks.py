"""Questions and answers to train and test the demo model.

Every question has one exact answer.  Whether a question may be used for training depends only on
a hash of its task and payload (the numbers or the word), so a held-out payload never appears in
training under any phrasing.  The one exception is small talk, a fixed list that is used for both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

_WORDS = """
cat dog sun sky sea red ice oak ant bee cup map pen box car hat key leg arm owl fox egg jam tea
kiln clay fire bird fish tree leaf rain snow wind star moon lamp door wall road ship boat milk rice
corn bean salt gold iron book page word line note song bell drum hand foot knee bear wolf deer frog
apple bread chair table house river ocean stone plant grass cloud storm light night green brown
white black horse sheep mouse tiger zebra eagle robin lemon grape peach melon berry onion sugar
honey water glass plate spoon knife paper brick flame smoke train truck plane piano music dance
planet rocket garden forest island desert valley bridge castle window pencil school letter number
animal rabbit monkey turtle spider orange banana carrot tomato potato butter cheese cookie dinner
silver copper purple yellow summer winter spring autumn friend family doctor artist driver farmer
python engine kernel memory system server client socket thread buffer matrix vector tensor signal
kitchen teacher student morning evening weather thunder rainbow dolphin penguin giraffe leopard
chicken pumpkin spinach avocado popcorn blanket curtain picture history science biology physics
battery machine furnace pottery ceramic potters village country capital network program compile
elephant kangaroo squirrel mountain computer keyboard software hardware building hospital
airplane umbrella notebook sandwich broccoli cucumber mushroom dinosaur sunshine language
alphabet question sentence birthday calendar sunlight triangle absolute balanced gradient
butterfly crocodile pineapple blueberry chocolate spaghetti telephone astronaut adventure
wonderful beautiful furniture newspaper breakfast lightning mountains president libraries
inference attention scheduler algorithm parameter strawberry basketball watermelon motorcycle
mississippi bookkeeper committee balloon coffee tattoo puppy banana bubble pepper giggle
"""
WORDS: tuple[str, ...] = tuple(
    sorted({word for word in _WORDS.split() if 3 <= len(word) <= 10}),
)

_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

_ADD = (
    "What is {a} + {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b} = ?",
    "{a} + {b}",
    "What is {a}+{b}?",
    "How much is {a} plus {b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "What is {a} minus {b}?",
    "{a} - {b} = ?",
    "{a} - {b}",
    "What is {a}-{b}?",
    "How much is {a} minus {b}?",
)
_REVERSE = (
    'Reverse the word "{w}".',
    'Spell "{w}" backwards.',
    'What is "{w}" reversed?',
    'Write "{w}" backwards.',
    'Reverse "{w}".',
)
_COUNT = (
    'How many times does the letter "{c}" appear in "{w}"?',
    'Count the letter "{c}" in "{w}".',
    'How many "{c}" are in "{w}"?',
    'How often does "{c}" occur in the word "{w}"?',
)
_LENGTH = (
    'How many letters are in "{w}"?',
    'Count the letters in "{w}".',
    'How long is the word "{w}"?',
)
_SORT = (
    "Sort these numbers: {n}",
    "Sort {n}.",
    "Put these numbers in order: {n}",
    "Order these numbers from smallest to largest: {n}",
    "Sort the numbers {n} in ascending order.",
)
_UPPER = (
    'Write "{w}" in upper case.',
    'Upper-case "{w}".',
    'Convert "{w}" to upper case.',
    'Put the word "{w}" in capital letters.',
)
_SPELL = (
    "Spell out {a}.",
    "Write {a} in words.",
    "Spell out the number {a}.",
    "How do you write {a} in words?",
)

_HELLO = "Hello! I am Kiln's demo model. How can I help you?"
_WHO = "I am a tiny demo model that runs inside Kiln."
_KILN = "Kiln is an engine that serves large language models."
_CAN = (
    "I can add and subtract numbers, reverse a word, count letters, sort numbers, "
    "write a word in upper case and spell out numbers."
)
_THANKS = "You are welcome!"
_BYE = "Goodbye! Keep the fire burning."
_WELL = "I am well, thank you. The kiln is warm."
_SIZE = "I am very small: a few million parameters."
_MAKER = "I was trained from scratch by a script in the Kiln repository."
_JOKE = "Why did the model visit the kiln? It wanted to be fired up."
_UNKNOWN = "I am too small to know that. Ask me what I can do."
_HELP = "Ask me something like: What is 12 + 30?"

SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("hello", _HELLO), ("hi", _HELLO), ("who are you?", _WHO), ("what can you do?", _CAN),
    ("thanks", _THANKS), ("thank you", _THANKS), ("bye", _BYE),
    ("Hello", _HELLO), ("Hello!", _HELLO), ("Hi", _HELLO), ("Hi!", _HELLO),
    ("Hey there!", _HELLO), ("Good morning!", _HELLO), ("Good evening!", _HELLO),
    ("Hello, who are you?", _WHO), ("Who are you?", _WHO), ("What are you?", _WHO),
    ("What is your name?", _WHO), ("Tell me about yourself.", _WHO), ("Introduce yourself.", _WHO),
    ("What is Kiln?", _KILN), ("Tell me about Kiln.", _KILN), ("What does Kiln do?", _KILN),
    ("Explain Kiln in one sentence.", _KILN),
    ("What can you do?", _CAN), ("What are you able to do?", _CAN), ("What can I ask you?", _CAN),
    ("Which tasks do you know?", _CAN), ("List your skills.", _CAN),
    ("Thanks", _THANKS), ("Thanks!", _THANKS), ("Thank you.", _THANKS), ("Thank you!", _THANKS),
    ("Thank you very much!", _THANKS),
    ("Bye", _BYE), ("Bye!", _BYE), ("Goodbye!", _BYE), ("See you later!", _BYE),
    ("How are you?", _WELL), ("How are you today?", _WELL), ("How do you feel?", _WELL),
    ("How big are you?", _SIZE), ("How many parameters do you have?", _SIZE),
    ("Are you a large model?", _SIZE),
    ("Who made you?", _MAKER), ("Who trained you?", _MAKER), ("How were you trained?", _MAKER),
    ("Tell me a joke.", _JOKE), ("Do you know a joke?", _JOKE),
    ("What is the capital of France?", _UNKNOWN), ("What is the capital of Italy?", _UNKNOWN),
    ("Tell me a story.", _UNKNOWN), ("Write a poem.", _UNKNOWN), ("Write a story.", _UNKNOWN),
    ("What is the meaning of life?", _UNKNOWN), ("What day is it?", _UNKNOWN),
    ("What is the weather today?", _UNKNOWN), ("Who is the president?", _UNKNOWN),
    ("Explain gravity.", _UNKNOWN), ("Translate this to French.", _UNKNOWN),
    ("Help", _HELP), ("Can you help me?", _HELP), ("Give me an example question.", _HELP),
)  # fmt: skip


class Pair(NamedTuple):
    """One question with its only accepted answer."""

    task: str
    question: str
    answer: str


class _Draft(NamedTuple):
    """A question with the payload that decides its side of the train/test split."""

    payload: str
    question: str
    answer: str


def is_held_out(task: str, payload: str) -> bool:
    """Tell whether a payload belongs to the tenth that is kept out of training."""
    if task == "spell" and int(payload) < 20:
        # "Twelve" cannot be derived from other numbers: the model needs its own example.
        return False
    digest = hashlib.sha256(f"{task}|{payload}".encode()).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def spell_number(value: int) -> str:
    """Write a number from 0 to 999 in English words."""
    if not 0 <= value <= 999:
        raise ValueError(f"spell_number takes 0 to 999, got {value}")
    parts = []
    if value >= 100:
        parts.append(f"{_ONES[value // 100]} hundred")
        value %= 100
        if value == 0:
            return parts[0]
    if value < 20:
        parts.append(_ONES[value])
    else:
        tens = _TENS[value // 10 - 2]
        parts.append(f"{tens}-{_ONES[value % 10]}" if value % 10 else tens)
    return " ".join(parts)


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(WORDS)
    length = rng.randint(3, 10)
    if kind < 0.55:
        return "".join(rng.choices(_LETTERS, k=length))
    if kind < 0.75:
        # Few different letters: repeated letters make counting and reversing hard.
        return "".join(rng.choices(rng.sample(_LETTERS, 4), k=length))
    first = rng.randrange(2)
    return "".join(
        rng.choice(_VOWELS if (index + first) % 2 else _CONSONANTS) for index in range(length)
    )


def _maybe_capital(word: str, rng: random.Random) -> str:
    return word.capitalize() if rng.random() < 0.1 else word


def _number(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.6:
        return rng.randint(100, 999)
    return rng.randint(10, 99) if kind < 0.85 else rng.randint(0, 9)


def _add(rng: random.Random) -> _Draft:
    a, b = _number(rng), _number(rng)
    # Ordered payload: otherwise a held-out sum would be seen in training the other way round.
    payload = f"{min(a, b)}+{max(a, b)}"
    return _Draft(payload, rng.choice(_ADD).format(a=a, b=b), str(a + b))


def _subtract(rng: random.Random) -> _Draft:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.5:
        a, b = b, a
    return _Draft(f"{a}-{b}", rng.choice(_SUBTRACT).format(a=a, b=b), str(a - b))


def _reverse(rng: random.Random) -> _Draft:
    word = _maybe_capital(_word(rng), rng)
    return _Draft(word.lower(), rng.choice(_REVERSE).format(w=word), f'"{word[::-1]}"')


def _count(rng: random.Random) -> _Draft:
    word = _word(rng)
    if rng.random() < 0.2:
        return _Draft(word, rng.choice(_LENGTH).format(w=word), str(len(word)))
    if rng.random() < 0.4:
        # Without such words nearly every answer is 1, and the model would learn to always say 1.
        word = "".join(rng.choices(rng.sample(_LETTERS, rng.randint(2, 3)), k=rng.randint(3, 10)))
    letter = rng.choice(word if rng.random() < 0.8 else _LETTERS)
    question = rng.choice(_COUNT).format(c=letter, w=word)
    return _Draft(f"{letter} in {word}", question, str(word.count(letter)))


def _sort(rng: random.Random) -> _Draft:
    top = rng.choice((9, 99, 99, 99, 99, 99, 999, 999, 999, 999))
    numbers = [rng.randint(0, top) for _ in range(rng.randint(3, 5))]
    answer = ", ".join(map(str, sorted(numbers)))
    question = rng.choice(_SORT).format(n=", ".join(map(str, numbers)))
    return _Draft(answer, question, answer)


def _upper(rng: random.Random) -> _Draft:
    word = _maybe_capital(_word(rng), rng)
    return _Draft(word.lower(), rng.choice(_UPPER).format(w=word), f'"{word.upper()}"')


def _spell(rng: random.Random) -> _Draft:
    # The twenty irregular words need more examples than the numbers built from them.
    value = rng.randint(0, 999 if rng.random() < 0.8 else 19)
    return _Draft(str(value), rng.choice(_SPELL).format(a=value), spell_number(value))


_TASKS: dict[str, Callable[[random.Random], _Draft]] = {
    "add": _add,
    "subtract": _subtract,
    "reverse": _reverse,
    "count": _count,
    "sort": _sort,
    "upper": _upper,
    "spell": _spell,
}
TASKS: tuple[str, ...] = (*_TASKS, "chat")
DEFAULT_WEIGHTS: dict[str, float] = {
    "add": 0.15,
    "subtract": 0.28,
    "reverse": 0.11,
    "count": 0.20,
    "sort": 0.13,
    "upper": 0.05,
    "spell": 0.03,
    "chat": 0.05,
}


def _draw(task: str, rng: random.Random, *, held_out_side: bool) -> Pair:
    if task == "chat":
        return Pair(task, *rng.choice(SMALL_TALK))
    while True:
        draft = _TASKS[task](rng)
        if is_held_out(task, draft.payload) == held_out_side:
            return Pair(task, draft.question, draft.answer)


def training_pair(rng: random.Random, weights: Mapping[str, float] | None = None) -> Pair:
    """Draw one pair for training, tasks in proportion to `weights`; never a held-out payload."""
    shares = DEFAULT_WEIGHTS if weights is None else weights
    task = rng.choices(list(shares), weights=list(shares.values()))[0]
    return _draw(task, rng, held_out_side=False)


def held_out(count: int, seed: int) -> list[Pair]:
    """Draw `count` different test pairs, tasks in turn; the same for the same seed."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    seen: set[str] = set()
    while len(pairs) < count:
        task = TASKS[len(pairs) % len(TASKS)]
        for _ in range(1000):
            pair = _draw(task, rng, held_out_side=True)
            if pair.question not in seen:
                break
        # A task that has run out of different questions (small talk) may repeat one.
        seen.add(pair.question)
        pairs.append(pair)
    return pairs
