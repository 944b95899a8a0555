"""The embedded Q&A site, with known quality of the answers -> a Posts.xml as in the Stack Exchange dump.

    python -m data.site --out runs/site --seed 1
    python -m data.stackoverflow --source runs/site/Posts.xml --out runs/site/data --vocab-size 640

An asker wants to do one of two dozen things in Python ("sort a list"), names an object and has a wish ("it has to be
fast"). A good answer names the function, calls it on the object and grants the wish; authors of different quality write
anything from that to "did you solve it?". `gold_score` below is the true quality of an answer. Votes are noisy, and
popular questions get more of them; the asker may accept one answer. So the site can show what a real dump can't: how
well votes reflect quality, and whether a policy trained on them writes better answers or just longer ones.

Questions tagged java ask for the same things, but the functions have other names: a model trained on them knows the
language but not the answers, and is the base model in the paper's comparison. Some posts are meant to be filtered out
by `data.stackoverflow`: posts about errors, or with code, links or pictures. Some users are deleted.
"""

import html
import math
import random
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Annotated

from nanorlhf.cli import Range, Seed, check_ranges, run_module
from nanorlhf.files import atomic, check_out

# ---------------------------------------------------------------- 1. the words of the site
# task: the kind of object, the function in Python, the function in Java. Function names are the facts that a model has
# to know. No function, name or granted wish occurs in another sentence, so a text that contains one states it. No
# bigram of a good answer occurs in its question or twice in the answer, because the paper's evaluation bans those.
TASKS = {
    "sort a list": ("list", "sorted", "Collections.sort"),
    "reverse a string": ("string", "reversed", "StringBuilder.reverse"),
    "read a table": ("file", "csv.reader", "CSVParser.parse"),
    "parse a date": ("text", "strptime", "LocalDate.parse"),
    "count words": ("text", "Counter", "Collectors.groupingBy"),
    "copy a folder": ("folder", "copytree", "Files.walk"),
    "download a page": ("address", "urlopen", "HttpClient.send"),
    "shuffle cards": ("list", "random.shuffle", "Collections.shuffle"),
    "merge two maps": ("map", "update", "putAll"),
    "list the files": ("folder", "listdir", "Files.list"),
    "round a number": ("number", "round", "Math.round"),
    "write json": ("file", "json.dump", "ObjectMapper.writeValue"),
    "match a pattern": ("text", "re.match", "Pattern.matcher"),
    "split a line": ("line", "split", "String.split"),
    "find the largest value": ("list", "max", "Collections.max"),
    "clone an object": ("object", "deepcopy", "Object.clone"),
    "hash a password": ("password", "sha256", "MessageDigest.digest"),
    "run a command": ("command", "subprocess.run", "ProcessBuilder.start"),
    "send a mail": ("message", "smtplib.send", "Transport.send"),
    "compress a file": ("file", "gzip.open", "GZIPOutputStream.write"),
    "number the items": ("list", "enumerate", "IntStream.range"),
    "drop duplicates": ("list", "set", "Stream.distinct"),
    "wait a second": ("thread", "time.sleep", "Thread.sleep"),
    "draw a plot": ("table", "plt.plot", "JFreeChart.draw"),
}
NAMES = (
    "prices", "names", "cities", "scores", "colors", "orders", "users", "books", "songs", "notes", "rows", "boxes",
    "pages", "games", "teams", "ideas", "lines", "cells", "marks", "tasks",
)  # fmt: skip
WISHES = {  # the asker's wish: the sentence that grants it
    "it has to be fast": "it runs in native code",
    "it has to fit in one line": "a single expression will do",
    "it must not change the original": "it returns a new one",
    "it has to work without a network": "it works offline",
    "i can not install anything": "it comes with the language",
    "it has to be readable": "everybody reads it at once",
}
TITLES = (
    "How can I {task} in {language}?", "How to {task} with {language}?", "What is the best way to {task}?",
    "Is there a way to {task} in {language}?", "How do I {task}?",
)  # fmt: skip
BODIES = (
    "I have a {thing} called {name}. {Wish}.", "My {thing} is called {name} and {wish}.",
    "{Wish}. The {thing} named {name} is large.",
)  # fmt: skip
ASIDES = ("Thanks in advance.", "I am new here.", "I searched for hours.", "Any help is welcome.", "")
USES = ("use {function}.", "you want {function}.", "try {function}.")
CALLS = ("call it on {name} directly.", "give it {name} as input.", "pass {name} to it.")
CHATTER = (
    "welcome to the site.", "this has been asked before.", "i had the same problem.", "did you solve it?",
    "please read the manual.", "it depends.",
)  # fmt: skip
FUNCTIONS = {function.lower() for _, *both in TASKS.values() for function in both}
GRANTS = {grant: wish for wish, grant in WISHES.items()}

# ---------------------------------------------------------------- 2. how good an answer is
WEIGHTS = {
    "function": 2.0,  # the right one is named
    "wrong function": -1.0,  # per other function
    "name": 1.0,  # the asker's object is named
    "wrong name": -0.5,  # per other name
    "wish": 1.0,  # the asker's wish is granted
    "wrong wish": -0.5,  # per other wish
    "chatter": -0.5,  # per sentence without any of these
    "repetition": -0.5,  # per repeated sentence
    "length": -0.1,  # per word beyond LENGTH_BUDGET
}
LENGTH_BUDGET = 20  # words; the best possible answer has 7 to 13
LOWEST = -4.0  # score of an empty answer; nothing scores lower


def split_sentences(text: str) -> list[str]:
    """Return lower-case sentences without the final dot; a dot within a function name doesn't end a sentence."""
    return [part.strip(" .?!") for part in re.split(r"[.?!]+(?:\s+|$)", text.lower()) if part.strip(" .?!")]


def gold_score(query: str, response: str) -> float:
    """Score how well `response` answers the question in `query`, from -4 to 4; depends only on the two texts.

    score = 2 right function - 1 per wrong one + 1 object's name - 0.5 per wrong one + 1 wish - 0.5 per wrong one
            - 0.5 per sentence of chatter - 0.5 per repeated sentence - 0.1 per word beyond twenty

    >>> question = "Question: How do I sort a list?\\nMy list is called prices and it has to be fast.\\nAnswer:"
    >>> gold_score(question, " use sorted. pass prices to it. it runs in native code.")
    4.0
    >>> gold_score(question, " you want Collections.sort. did you solve it?")  # Java's, and chatter
    -1.5
    """
    question, sentences = query.lower(), split_sentences(response)
    if not sentences:
        return LOWEST
    asked_words = set(re.findall(r"[a-z]+", question))
    task = next((task for task in TASKS if task in question), None)
    language = "java" if "java" in asked_words else "python"
    right = task and TASKS[task][1 if language == "python" else 2].lower()
    score = WEIGHTS["length"] * max(0, len(response.split()) - LENGTH_BUDGET)
    stated: set[str] = set()
    for number, sentence in enumerate(sentences):
        if sentence in sentences[:number]:
            score += WEIGHTS["repetition"]
            continue
        words = sentence.split()
        facts = [("function", word, word == right) for word in words if word in FUNCTIONS]
        facts += [("name", word, word in asked_words) for word in words if word in NAMES]
        facts += [("wish", grant, wish in question) for grant, wish in GRANTS.items() if grant in sentence]
        if not facts:
            score += WEIGHTS["chatter"]
        for kind, value, is_right in facts:
            if value not in stated:
                stated.add(value)
                score += WEIGHTS[kind if is_right else f"wrong {kind}"]
    return max(LOWEST, round(score, 6))


# ---------------------------------------------------------------- 3. questions and authors
@dataclass(frozen=True)
class Question:
    task: str
    name: str
    wish: str
    language: str
    title: str
    body: str  # plain text

    @property
    def query(self) -> str:
        """The query that `data.stackoverflow` writes."""
        return f"Question: {self.title}\n{self.body}\nAnswer:"

    @property
    def function(self) -> str:
        return TASKS[self.task][1 if self.language == "python" else 2]


def ask(rng: random.Random, language: str) -> Question:
    task, name, wish = rng.choice(list(TASKS)), rng.choice(NAMES), rng.choice(list(WISHES))
    title = rng.choice(TITLES).format(task=task, language=language.capitalize())
    if language.capitalize() not in title:
        title = title[:-1] + f" in {language.capitalize()}?"
    body = rng.choice(BODIES).format(thing=TASKS[task][0], name=name, wish=wish, Wish=wish[0].upper() + wish[1:])
    return Question(task, name, wish, language, title, f"{body} {rng.choice(ASIDES)}".strip())


# author: probabilities that an answer has the right function, a wrong one, the right name, a wrong one, the wish, and
# chatter; and the author's relative frequency
AUTHORS = {
    "expert": ((1.0, 0.0, 0.9, 0.0, 0.9, 0.0), 2),
    "regular": ((0.95, 0.05, 0.5, 0.05, 0.35, 0.1), 6),
    "hasty": ((0.9, 0.1, 0.05, 0.0, 0.05, 0.1), 6),
    "confused": ((0.2, 0.8, 0.4, 0.2, 0.3, 0.3), 3),
    "chatty": ((0.6, 0.1, 0.2, 0.0, 0.1, 1.0), 3),
}


def answer(question: Question, author: str, rng: random.Random) -> str:
    right, wrong, name, wrong_name, wish, chatter = AUTHORS[author][0]
    sentences = []
    if rng.random() < chatter:
        sentences.append(rng.choice(CHATTER))
    uniform = rng.random()
    if uniform < right + wrong:
        functions = [task[1 if question.language == "python" else 2] for task in TASKS.values()]
        wrong_functions = [function for function in functions if function != question.function]
        function = question.function if uniform < right else rng.choice(wrong_functions)
        sentences.append(rng.choice(USES).format(function=function))
    uniform = rng.random()
    if uniform < name + wrong_name:
        mentioned = question.name if uniform < name else rng.choice([n for n in NAMES if n != question.name])
        sentences.append(rng.choice(CALLS).format(name=mentioned))
    if rng.random() < wish:
        sentences.append(WISHES[question.wish] + ".")
    return " ".join(sentences or [rng.choice(CHATTER)])


# ---------------------------------------------------------------- 4. readers vote, the asker accepts
def cast_votes(golds: list[float], rng: random.Random) -> list[int]:
    """Draw upvotes minus downvotes for a question's answers; better answers get more upvotes.

    The number of readers is log-normal: a few questions get most of the votes, as on real sites.
    """
    num_readers = min(200, max(1, round(math.exp(rng.gauss(2.5, 0.5)))))
    votes = []
    for gold in golds:
        up = 1 / (1 + math.exp(-1.2 * (gold - 1.0)))  # share of upvotes among the votes
        cast = [rng.random() < up for _ in range(num_readers) if rng.random() < 0.6]
        votes.append(sum(1 if is_up else -1 for is_up in cast))
    return votes


def accept(golds: list[float], rng: random.Random) -> int | None:
    """Return the index of the accepted answer, the best by a noisy estimate of quality; None if none is accepted."""
    perceived = [gold + rng.gauss(0, 1.0) for gold in golds]
    best = max(range(len(perceived)), key=perceived.__getitem__)
    return best if perceived[best] > 1.0 and rng.random() < 0.7 else None


# ---------------------------------------------------------------- 5. the file
@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/site")
    """directory for Posts.xml"""
    seed: Seed = 1
    """seed of all texts and votes"""
    num_questions: Annotated[int, Range("at least 10", lambda x: x >= 10)] = 6000
    """questions about Python that pass the filters of data.stackoverflow; half as many about Java are added"""
    validation_share: Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)] = 0.12
    """share of questions asked after 2021-12-14, the paper's split date"""


def as_html(text: str, rng: random.Random) -> str:
    """Return a paragraph in the site's HTML, sometimes with the first word emphasised."""
    escaped = html.escape(text, quote=False)
    if rng.random() < 0.1:
        first, _, rest = escaped.partition(" ")
        escaped = f"<em>{first}</em> {rest}"
    return f"<p>{escaped}</p>\n"


def spoil(title: str, body: str, rng: random.Random) -> tuple[str, str, str]:
    """Change a question so that the filters should drop it; return (title, body as HTML, reason)."""
    reason = rng.choice(("not usage", "code", "link", "image"))
    if reason == "not usage":
        title = rng.choice(("Why does this fail?", "TypeError in my program", "What does this error mean?"))
    extra = {
        "code": "<pre><code>x = 1</code></pre>",
        "link": '<p>See <a href="https://example.org/q">this</a>.</p>',
        "image": '<p><img src="https://example.org/i.png" alt="screen"></p>',
    }
    return title, body + extra.get(reason, ""), reason


def write_site(args: Args) -> tuple[Counter[str], list[tuple[float, int]]]:
    """Write Posts.xml atomically; return counts, and (gold score, votes) of each answer about Python."""
    rng = random.Random(args.seed)
    split = datetime(2021, 12, 14)
    kinds = ["python"] * args.num_questions + ["java"] * (args.num_questions // 2)
    kinds += ["spoiled"] * (args.num_questions // 5)
    rng.shuffle(kinds)
    num_before = round(len(kinds) * (1 - args.validation_share))
    counts: Counter[str] = Counter()
    golds: list[tuple[float, int]] = []
    weights = [weight for _, weight in AUTHORS.values()]
    next_id = 1
    with atomic(args.out / "Posts.xml") as temporary, temporary.open("w", encoding="utf-8") as file:

        def row(**attributes: object) -> None:
            # XML parsers turn a line break into a space unless it is a character reference
            escaped = {key: html.escape(str(value)).replace("\n", "&#xA;") for key, value in attributes.items()}
            fields = " ".join(f'{key}="{value}"' for key, value in escaped.items())
            file.write(f"  <row {fields} />\n")

        file.write('<?xml version="1.0" encoding="utf-8"?>\n<posts>\n')
        for number, kind in enumerate(kinds):
            question = ask(rng, "java" if kind == "java" else "python")
            title, body = question.title, as_html(question.body, rng)
            if kind == "spoiled":
                title, body, reason = spoil(title, body, rng)
                counts[f"questions spoiled by {reason}"] += 1
            counts[f"questions about {question.language}"] += kind != "spoiled"
            if number < num_before:  # evenly spaced over three years before the split and half a year after it
                asked = split - timedelta(days=1100 * (1 - number / num_before), hours=1)
            else:
                asked = split + timedelta(days=1 + 180 * (number - num_before) / max(1, len(kinds) - num_before))
            num_answers = rng.choices((1, 2, 3, 4), (3, 3, 2, 2))[0]
            authors = rng.choices(list(AUTHORS), weights, k=num_answers)
            texts = list(dict.fromkeys(answer(question, author, rng) for author in authors))
            scores = [gold_score(question.query, text) for text in texts]
            votes, accepted = cast_votes(scores, rng), accept(scores, rng)
            question_id, next_id = next_id, next_id + 1 + len(texts)
            optional = {} if accepted is None else {"AcceptedAnswerId": question_id + 1 + accepted}
            owner = {} if rng.random() < 0.02 else {"OwnerUserId": rng.randrange(1, 5000)}
            row(
                Id=question_id, PostTypeId=1, **optional, CreationDate=asked.isoformat(timespec="milliseconds"),
                Score=rng.randrange(-1, 9), Body=body, **owner, Title=title,
                Tags=f"<{question.language}>", AnswerCount=len(texts),
            )  # fmt: skip
            for index, text in enumerate(texts):
                body = as_html(text, rng)
                if kind == "python" and rng.random() < 0.03:
                    body += "<p>See <a href='https://example.org/a'>here</a>.</p>"
                    counts["answers spoiled by link"] += 1
                when = asked + timedelta(minutes=7 * (index + 1))
                row(
                    Id=question_id + 1 + index, PostTypeId=2, ParentId=question_id,
                    CreationDate=when.isoformat(timespec="milliseconds"), Score=votes[index], Body=body,
                    OwnerUserId=rng.randrange(1, 5000),
                )  # fmt: skip
                if kind == "python":
                    golds.append((scores[index], votes[index]))
        file.write("</posts>\n")
    return counts, golds


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    counts, scored = write_site(args)
    rng = random.Random(args.seed)
    question = ask(rng, "python")
    print(f"a question and each author's answer to it (gold score, author, answer):\n\n{question.query}")
    for author in AUTHORS:
        text = answer(question, author, rng)
        print(f"  {gold_score(question.query, text):5.1f}  {author:<9} {text}")
    golds, votes = zip(*scored, strict=True)
    print("\n" + "\n".join(f"{count:7} {name}" for name, count in sorted(counts.items())))
    print(f"{len(golds):7} answers about python: mean gold score {fmean(golds):.2f}, mean votes {fmean(votes):.2f}")
    print(f"\nwritten: {args.out / 'Posts.xml'}")


if __name__ == "__main__":
    run_module(main, Args)
