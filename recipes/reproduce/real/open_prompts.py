"""Open questions built from templates and topics: requests without a single answer, which reasoning-gym does not have.

Every kind is a list of templates with places for topics; a question is one combination. They are drawn without
repetition from all combinations of a kind, in an order that the seed alone determines.
"""

import random
from itertools import product

from bebop.errors import UserError

PLACES = (
    "a lighthouse", "a small bakery", "a night train", "the last library in town", "an island without roads",
    "a school in the mountains", "a space station", "an old theatre", "a market at dawn", "a forest in winter",
)  # fmt: skip
PEOPLE = (
    "a retired sailor", "two sisters", "a shy robot", "a young doctor", "a boy who cannot sleep", "a lost dog",
    "an honest thief", "a gardener", "a chess player", "a tired teacher",
)  # fmt: skip
THINGS = (
    "fruits", "animals that live in the sea", "capital cities in Europe", "musical instruments", "kitchen tools",
    "programming languages", "famous scientists", "board games", "flowers", "things to pack for a hike",
    "healthy breakfasts", "jobs in a hospital", "ways to save energy", "words that describe the weather",
    "animals of the forest", "sports that need a ball", "kinds of bread", "rivers", "planets and moons",
    "habits of good students", "household chores", "things that are round", "vegetables", "means of transport",
)  # fmt: skip
SUBJECTS = (
    "photosynthesis", "why the sky is blue", "how a bicycle stays upright", "inflation", "the water cycle",
    "how vaccines work", "what a database is", "plate tectonics", "the rules of football", "how bread rises",
    "compound interest", "what gravity does", "how a microwave oven heats food", "recycling", "the French Revolution",
    "how rainbows form", "what an algorithm is", "how to read a map", "supply and demand", "why we dream",
    "how a camera works", "democracy", "the moon's phases", "what makes a good password",
)  # fmt: skip
FUNCTIONS = (
    "adds up the even numbers of a list", "reverses the words of a sentence", "checks whether a word is a palindrome",
    "counts the vowels of a text", "finds the largest number of a list", "removes duplicates from a list",
    "computes the n-th Fibonacci number", "turns Celsius into Fahrenheit", "merges two sorted lists",
    "checks whether a number is prime", "counts how often each word occurs", "flattens a nested list",
    "finds the longest word of a sentence", "computes the average of some numbers", "rotates a list by k places",
    "checks whether two words are anagrams", "splits a list into chunks of n", "computes a factorial",
    "finds the second smallest number", "replaces every space by an underscore",
)  # fmt: skip
OCCASIONS = (
    "asking for a day off", "inviting a friend to a birthday party", "complaining about a late parcel",
    "thanking a neighbour for help", "applying for a job in a bookshop", "asking a teacher for advice",
    "cancelling a gym membership", "welcoming a new colleague", "asking the landlord to repair the heating",
    "apologising for a missed meeting", "recommending a restaurant", "reporting a lost umbrella",
)  # fmt: skip
DISHES = (
    "pancakes", "vegetable soup", "rice with beans", "apple pie", "a potato salad", "tomato sauce", "fried noodles",
    "banana bread", "an omelette", "lentil curry", "pizza dough", "lemonade",
)  # fmt: skip
SIGHTS = (
    "autumn", "the sea at night", "a cup of tea", "an empty street", "the first snow", "my grandmother's garden",
    "a train station", "silence", "a thunderstorm", "the colour green", "an old photograph", "Monday mornings",
)  # fmt: skip
SKILLS = (
    "swimming", "public speaking", "cooking", "saving money", "learning a language", "drawing", "waking up early",
    "playing the guitar", "making friends in a new city", "gardening", "writing an essay", "running a marathon",
    "falling asleep", "job interviews", "chess", "keeping a room tidy",
)  # fmt: skip
ISSUES = (
    "homework", "school uniforms", "working from home", "zoos", "a four-day week", "cars in city centres",
    "mobile phones in class", "free museums", "nuclear power", "space travel", "tourism", "paper books",
    "pets in offices", "public transport", "fast food",
)  # fmt: skip

# kind -> templates, and the topics for {0} and {1}
KINDS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "story": (
        ("Write a short story about {0} in {1}.", "Tell me a story that begins in {1} and is about {0}.",
         "Write the first paragraph of a novel about {0}. It takes place in {1}.",
         "Write a funny story of a few sentences about {0} and {1}."),
        (PEOPLE, PLACES),
    ),
    "list": (
        ("List ten {0}.", "Name five {0} and say one sentence about each.", "Give me a numbered list of {0}.",
         "Make a table of {0} with two columns.", "What are some {0}? Answer with bullet points.",
         "Write down {0} in alphabetical order."),
        (THINGS,),
    ),
    "code": (
        ("Write a Python function that {0}.", "Write a JavaScript function that {0}.",
         "Write a Python function that {0}, with a docstring and a test.", "Show me C code that {0}.",
         "Explain step by step how a program {0}.", "Write a short Python script that {0} and prints the result."),
        (FUNCTIONS,),
    ),
    "explain": (
        ("Explain {0} to a child.", "Explain {0} in three sentences.", "Write a short paragraph about {0}.",
         "What is the most common misunderstanding about {0}?", "Give an example that helps to understand {0}."),
        (SUBJECTS,),
    ),
    "letter": (
        ("Write a polite email {0}.", "Write a short and friendly message {0}.", "Write a formal letter {0}.",
         "Write two versions of a note {0}: one formal, one casual.", "Draft a reply to somebody who is {0}."),
        (OCCASIONS,),
    ),
    "dialogue": (
        ("Write a dialogue between {0} and a stranger they meet at {1}.",
         "Write an interview with {0} about life in {1}."),
        (PEOPLE, PLACES),
    ),
    "advice": (
        ("How can I get better at {0}?", "Give me three tips on {0}.", "I have trouble with {0}. What should I do?",
         "Make a plan for four weeks that helps me with {0}.", "What do beginners get wrong about {0}?"),
        (SKILLS,),
    ),
    "argue": (
        ("Give arguments for and against {0}.", "Write a short speech about {0}.", "Should there be more {0}? Decide.",
         "Two friends disagree about {0}. What does each of them say?", "Write a letter to a newspaper about {0}."),
        (ISSUES,),
    ),
    "describe": (
        ("Describe {0} in detail.", "Write a travel guide to {0}.", "Write an advertisement for {0}.",
         "What can one hear and smell in {0}?", "What happens in {0} on an ordinary day?"),
        (PLACES,),
    ),
    "diary": (
        ("Write a diary entry of {0} after a day at {1}.", "Write a postcard from {0}, who is at {1}."),
        (PEOPLE, PLACES),
    ),
    "recipe": (
        ("Give me a recipe for {0}.", "How do I make {0}? Answer in numbered steps.",
         "I have no oven. How can I make {0}?", "Write a shopping list for {0}.",
         "What can go wrong when I make {0}?"),
        (DISHES,),
    ),
    "poem": (
        ("Write a poem about {0}.", "Write a haiku about {0}.", "Write four rhyming lines about {0}.",
         "Write a song about {0} with a chorus.", "Describe {0} in the style of a poem without rhymes."),
        (SIGHTS,),
    ),
}  # fmt: skip


def open_questions(kind: str, count: int, seed: int) -> list[str]:
    """Return ``count`` different questions of a kind; the first ones are the same for every count.

    Raises:
        UserError: The kind has fewer combinations.
    """
    templates, topics = KINDS[kind]
    every = [template.format(*chosen) for template in templates for chosen in product(*topics)]
    if count > len(every):
        raise UserError(f"{kind}: {count} questions are not possible, its templates and topics give {len(every)}")
    return random.Random(f"{kind}/{seed}").sample(every, len(every))[:count]
