"""How the requests begin that a model writes for itself. Left alone it begins one in six in the same way."""

from __future__ import annotations

SUBJECTS = tuple(
    subject.strip()
    for subject in """
    lighthouses; beekeeping; a night train; bread; volcanoes; chess; the moon; bicycles; a small island; old maps;
    gardening in the shade; elections; coffee; whales; a lost letter; public libraries; earthquakes; violins;
    the stock market; sleep; a family recipe; ancient Rome; vaccines; the desert; running; clocks; a haunted house;
    solar panels; friendship; the printing press; snow; job interviews; penguins; jazz; a broken window; bridges;
    photosynthesis; a city without cars; tea; the human heart; dinosaurs; moving house; honesty; knots; rivers;
    artificial intelligence; a school play; glass; migrating birds; budgeting; the silk road; thunderstorms; pottery;
    a first day at work; black holes; football; forests; inflation; a mountain rescue; dreams; cats; recycling;
    the Olympic games; mushrooms; a message in a bottle; electricity; homework; the French Revolution; sailing;
    antibiotics; a shy robot; memory; olive oil; traffic; mathematics; a stolen painting; soil; language learning;
    the Arctic; jealousy; camping; insects; a power cut; democracy; the violin maker's daughter; weather forecasts;
    stress; coral reefs; a secret garden; taxes; rockets; fairy tales; dogs; water shortages; a wrong number; museums;
    probability; grandparents; the invention of paper; wind turbines; a chess game against a stranger; sugar; tides;
    remote work; castles; a talking fox; nutrition; gravity; neighbours; the history of shoes; online shopping;
    swimming; a letter from the future; wheat; trains in the mountains; courage; the water cycle; board games;
    a market at dawn; hospitals; comets; an unusual birthday; ice cream; plastic; the Vikings; meditation
    """.replace("\n", " ").split(";")
)

CHAT = (
    "How do I",
    "How can I",
    "How does",
    "How much",
    "How long",
    "How would you",
    "What is",
    "What are",
    "What does",
    "What should I",
    "What happens when",
    "What would",
    "Why do",
    "Why is",
    "Why are",
    "Which",
    "Who",
    "When",
    "Where",
    "Is it",
    "Are there",
    "Can I",
    "Can you explain",
    "Can you give me",
    "Could you help me",
    "Should I",
    "Do you",
    "Does",
    "I'm",
    "I have",
    "I need",
    "I want to",
    "I'd like",
    "I've been",
    "I am writing",
    "My friend",
    "My boss",
    "My teacher",
    "We are",
    "Please",
    "Give me",
    "Tell me",
    "Help me",
    "Suggest",
    "Recommend",
    "Compare",
    "Describe",
    "Explain",
    "Imagine",
    "Create a plan",
    "List",
    "Name",
    "Rewrite",
    "Translate",
    "Find",
    "If",
    "In",
    "",
)

ABOUT = (
    "Write a short story about {}",
    "Write a poem about {}",
    "Write an essay on {}",
    "Write a letter to a friend about {}",
    "Write an email about {}",
    "Write a dialogue about {}",
    "Write the beginning of a novel about {}",
    "Write a diary entry about {}",
    "Write a speech about {}",
    "Write a product description for something to do with {}",
    "Explain {}",
    "Explain to a child what {}",
    "Describe {}",
    "List five facts about {}",
    "Give me tips on {}",
    "Give me three ideas for {}",
    "Compare {}",
    "What is important to know about {}",
    "What are the advantages and disadvantages of {}",
    "What do people get wrong about {}",
    "How has {} changed",
    "Why does {} matter",
    "I have a question about {}",
    "Can you teach me about {}",
)

PASSAGE = (
    "Write a news report about {}",
    "Write two paragraphs about {}",
    "Write an article about {}",
    "Write an encyclopedia entry about {}",
    "Write a story of two paragraphs about {}",
    "Write a report on {}",
    "Write a blog post about {}",
    "Write a review of a book about {}",
    "Tell me the history of {}",
    "Explain in detail {}",
)

SUMMARIES = (
    "Summarise the following text in {} sentences.",
    "Summarize the text below in {} sentences.",
    "What are the {} main points of this text?",
    "Give me a summary of this in at most {} sentences.",
    "Read the text and write a short summary of it.",
    "Summarize this article.",
    "Please make this text shorter and keep the important parts.",
    "TL;DR of the following?",
    "Write a one-paragraph summary of the following passage.",
    "Summarise this as a list of {} points.",
)

CODE = (
    "Write a Python function that",
    "Write a Python function to",
    "Write a Python program that",
    "Write a Python class",
    "Write a Python script which",
    "Write a function in JavaScript that",
    "Write a function in C that",
    "Write a C++ program to",
    "Write a Java method that",
    "Write a Go function that",
    "Write an SQL query that",
    "Write a shell script that",
    "Write a recursive function that",
    "Implement a",
    "How do I in Python",
    "Show me how to write code that",
)

TASKS = (
    "sorts",
    "counts",
    "reads a file and",
    "converts",
    "checks whether",
    "removes",
    "merges two",
    "finds the largest",
    "prints",
    "parses",
    "groups",
    "filters",
    "reverses",
    "splits",
    "simulates",
    "calculates the",
    "returns the first",
    "replaces",
    "stores",
    "validates",
    "searches",
    "compares",
    "generates",
    "",
)

EDITS = (
    "Add type hints to this code.",
    "Add a docstring to the code below.",
    "Add comments to this code that explain each step.",
    "Add error handling to this code. Return the full code.",
    "Rename the variables so that they are easier to understand.",
    "Make this code shorter.",
    "Make this code faster.",
    "Find the bugs in this code and fix them.",
    "Rewrite this code as a class.",
    "Rewrite this so that it takes the values from the user.",
    "Write a test for this code.",
    "Explain what this code does.",
    "Add logging to this code and return all of it.",
    "Change this code so that it returns the result instead of printing it.",
    "Translate this code to JavaScript.",
    "Review this code.",
)

CONTINUED = ("About {}:", "The history of {}", "What is it about {}", "A story of {}", "In a book on {}", "News: {}")
