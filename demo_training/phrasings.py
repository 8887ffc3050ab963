"""What users say. {w} is the word, {a} the word with its article where it is a noun."""

import itertools

# The plain questions, and then the many ways in which the same is asked.
DEFINE = (
    "What does '{w}' mean?",
    "What does {w} mean?",
    'What does "{w}" mean?',
    "Define {w}.",
    "Define '{w}'.",
    "define: {w}",
    "What is {a}?",
    "What is {w}?",
    "What is '{w}'?",
    "What's {a}?",
    "meaning of {w}",
    "What is the meaning of {w}?",
    "What is the meaning of '{w}'?",
    "What is the definition of {w}?",
    "Definition of {w}",
    "{w}",
    "{w}?",
    "'{w}'",
    "Explain {w}.",
    "Explain the word '{w}'.",
    "Tell me what {w} means.",
    "Can you define {w}?",
    "Describe {a}.",
    "What does the word {w} mean?",
    "What is meant by {w}?",
    "What do you understand by {w}?",
    "What is the sense of {w}?",
    "How would you define {w}?",
    "How do you define '{w}'?",
    "{w} means what?",
    "So what is {a}?",
    "And what does {w} mean?",
    "What exactly is {a}?",
    "Do you know {w}?",
    "Do you know the word '{w}'?",
    "Have you heard of {w}?",
    "I don't understand {w}.",
    "I don't know what {w} means.",
    "The word is {w}. What does it mean?",
)
_COMMANDS = (
    "define",
    "explain",
    "describe",
    "look up",
    "tell me about",
    "give me the definition of",
    "give me a definition of",
    "tell me the definition of",
    "tell me the meaning of",
    "give me the meaning of",
    "explain the meaning of",
    "say what is meant by",
    "help me understand",
)
_OBJECTS = ("{w}", "'{w}'", '"{w}"', "the word {w}", "the word '{w}'", "the term {w}")
_COMMAND_FORMS = (
    "{c}.",
    "please {c}.",
    "{c}, please.",
    "can you {c}?",
    "could you {c}?",
    "could you please {c}?",
    "would you {c}?",
    "will you {c} for me?",
    "I want you to {c}.",
    "I would like you to {c}.",
)
_CLAUSES = (
    "what {w} means",
    "what '{w}' means",
    "what the word {w} means",
    "what the word '{w}' means",
    "what {a} is",
    "what is meant by {w}",
    "the meaning of {w}",
    "the meaning of '{w}'",
    "the meaning of the word {w}",
    "the definition of {w}",
    "the definition of '{w}'",
)
_CLAUSE_FORMS = (
    "tell me {c}.",
    "please tell me {c}.",
    "please explain {c}.",
    "explain to me {c}.",
    "explain {c}.",
    "can you explain {c}?",
    "can you tell me {c}?",
    "could you tell me {c}?",
    "could you please explain {c}?",
    "do you know {c}?",
    "do you remember {c}?",
    "I want to know {c}.",
    "I would like to know {c}.",
    "I'd like to know {c}.",
    "I need {c}.",
    "I wonder {c}.",
    "I am looking for {c}.",
    "let me know {c}.",
    "would you tell me {c}?",
)
# Never trained: they measure whether the model understands the question or has memorised its words.
DEFINE_UNTRAINED = (
    "Please tell me the meaning of '{w}'.",
    "Could you explain what {w} means?",
    "I would like a definition of {w}.",
    "Do you know the meaning of the word '{w}'?",
)


def _bare(template: str) -> str:
    return "".join(c for c in template.lower() if c not in "'\".?")


def _define_in_many_words() -> tuple[str, ...]:
    commands = (f"{command} {word}" for command in _COMMANDS for word in _OBJECTS)
    texts = [f.replace("{c}", c) for f, c in itertools.product(_COMMAND_FORMS, commands)]
    texts += [f.replace("{c}", c) for f, c in itertools.product(_CLAUSE_FORMS, _CLAUSES)]
    untrained = {_bare(template) for template in DEFINE_UNTRAINED}
    return tuple(t[0].upper() + t[1:] for t in texts if _bare(t) not in untrained)


DEFINE_IN_MANY_WORDS = _define_in_many_words()
DEFINE_AGAIN = (
    "What does it mean again?",
    "What does that mean again?",
    "Define it again.",
    "Say that again.",
    "Repeat that, please.",
)

KIND = (
    "What kind of thing is {a}?",
    "What is {w} a kind of?",
    "What type of thing is {a}?",
    "Broader term for {w}?",
    "What is a broader term for '{w}'?",
    "What sort of thing is {a}?",
    "What is the hypernym of {w}?",
    "Tell me what kind of thing {a} is.",
    "Can you give me a broader term for {w}?",
    "Which kind of thing is {a}?",
)
KIND_OF_IT = (
    "What kind of thing is it?",
    "What kind of thing is it?",
    "What kind of thing is that?",
    "What type of thing is it?",
    "What is it a kind of?",
    "Is there a broader term for it?",
    "And a broader term?",
    "What sort of thing is it?",
    "What kind of thing is this?",
    "Which kind of thing is that?",
    "Can you give me a broader term?",
)
KIND_OF_NTH = ("What kind of thing is the {n} one?", "What kind of thing was the {n} word?")

SYNONYM = (
    "Another word for {w}?",
    "What is another word for {w}?",
    "What is another word for '{w}'?",
    "Give me a synonym for {w}.",
    "What is a synonym of {w}?",
    "synonym of {w}",
    "What's another word for {w}?",
    "Is there another word for {w}?",
    "Can you give me another word for {w}?",
    "Do you know a synonym for {w}?",
    "Tell me another word for '{w}'.",
    "Synonyms of {w}?",
)
SYNONYM_OF_IT = (
    "Another word for it?",
    "Another word for it?",
    "What is another word for it?",
    "Is there another word for that?",
    "Give me a synonym.",
    "And a synonym?",
    "What's another word for it?",
    "Do you know another word for it?",
    "Can you give me a synonym?",
    "Is there a synonym for it?",
    "Any other word for it?",
)
SYNONYM_OF_NTH = ("Another word for the {n} one?", "And another word for the {n} one?")
NTH_ONE = ("And the {n} one?", "What does the {n} one mean?", "What was the {n} one again?")
ORDINALS = ("first", "second", "third", "fourth")

LEAD_IN = (
    "Remember: ",
    "Remember these: ",
    "Remember these numbers: ",
    "Note: ",
    "Here is a list: ",
    "Prices: ",
    "Codes: ",
    "Memorise this: ",
    "",
)
PAIR = ("{k} = {v}", "{k} = {v}", "{k}: {v}", "{k} is {v}", "{k} -> {v}")
PAIR_SEPARATORS = (", ", ", ", "; ", "\n", ". ")
QUERY = (
    "What number is {k}?",
    "What number is {k}?",
    "What is the number for {k}?",
    "Which number goes with {k}?",
    "What is {k}?",
    "{k} = ?",
    "What was {k}?",
)
NEXT_QUERY = ("And {k}?", "{k}?", "What about {k}?")
OVERWRITE = (
    "{k} = {v} now.",
    "{k} is now {v}.",
    "Change {k} to {v}.",
    "Set {k} = {v}.",
    "Now {k} = {v}.",
)
ADD = ("Also {k} = {v}.", "And {k} = {v}.", "Remember {k} = {v} too.", "Add {k} = {v}.")

REPEAT = (
    "Repeat: {x}",
    "Repeat these words: {x}",
    "Say this back to me: {x}",
    "Repeat after me: {x}",
)
REVERSE = (
    "Reverse: {x}",
    "Reverse this list: {x}",
    "Say these words in reverse order: {x}",
    "Repeat backwards: {x}",
)

OWN_FACT = ("My {x} is {v}.", "My {x} is {v}.", "Remember that my {x} is {v}.")
FACT = (
    "The {x} is {v}.",
    "The {x} is {v}.",
    "Remember that the {x} is {v}.",
    "Note: the {x} is {v}.",
)
OWN_FACT_NOW = ("My {x} is now {v}.", "Actually, my {x} is {v}.")
FACT_NOW = ("The {x} is now {v}.", "Actually, the {x} is {v}.")
OWN_ASK = ("What is my {x}?", "What is my {x}?", "Do you remember my {x}?", "What was my {x}?")
ASK = ("What is the {x}?", "What is the {x}?", "Do you remember the {x}?", "What was the {x}?")
INTRODUCE = ("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "Hello, my name is {v}.")

SYSTEM = (
    "You are a helpful assistant.",
    "You are a dictionary.",
    "Be brief.",
    "You are a helpful assistant that answers questions about words.",
    "Answer in English.",
    "Answer truthfully and concisely.",
    "You are minivllm's demo model.",
)
