//! What is asked in the speculation part.

/// Text that repeats what it was given: edits, echoes, conversions.
pub(crate) const AGENT: [&str; 6] = [
    "Repeat this file exactly, without any comment:\n```python\nimport json\nimport sys\n\n\ndef load_config(path):\n    with open(path) as handle:\n        config = json.load(handle)\n    config.setdefault(\"retries\", 3)\n    config.setdefault(\"timeout\", 30)\n    return config\n\n\ndef main():\n    config = load_config(sys.argv[1])\n    print(config[\"retries\"], config[\"timeout\"])\n\n\nif __name__ == \"__main__\":\n    main()\n```",
    "The tool returned:\n{\"files\": [{\"name\": \"src/main.rs\", \"size\": 1204, \"modified\": \"2026-01-03\"}, {\"name\": \"src/lib.rs\", \"size\": 8810, \"modified\": \"2026-01-05\"}, {\"name\": \"src/config.rs\", \"size\": 2203, \"modified\": \"2026-01-05\"}, {\"name\": \"tests/basic.rs\", \"size\": 912, \"modified\": \"2025-12-28\"}], \"total\": 4}\nReturn the same JSON object.",
    "Change the name of the function `area` to `surface` and print the whole file:\n```python\ndef area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError(\"sizes are positive\")\n    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n\n\ndef describe(width, height):\n    return f\"{width} by {height}: {area(width, height)}\"\n```",
    "Copy the ERROR lines of this log:\n2026-01-05 10:00:01 INFO server started on port 8080\n2026-01-05 10:00:07 ERROR connection to database db-1 refused: timeout after 5000 ms\n2026-01-05 10:00:09 INFO retrying connection to database db-1\n2026-01-05 10:00:14 ERROR connection to database db-1 refused: timeout after 5000 ms\n2026-01-05 10:00:15 WARN falling back to database db-2\n2026-01-05 10:00:16 ERROR connection to database db-2 refused: host unknown\n2026-01-05 10:00:20 INFO shutting down",
    "Add a docstring to every function of this file and print the whole file:\n```python\ndef read_lines(path):\n    with open(path) as handle:\n        return [line.rstrip(\"\\n\") for line in handle]\n\n\ndef count_words(lines):\n    counts = {}\n    for line in lines:\n        for word in line.split():\n            counts[word] = counts.get(word, 0) + 1\n    return counts\n\n\ndef top_words(counts, n):\n    return sorted(counts, key=counts.get, reverse=True)[:n]\n```",
    "Write this table again as it is:\n| city | country | population | area |\n|---|---|---|---|\n| Paris | France | 2102650 | 105 |\n| Berlin | Germany | 3677472 | 891 |\n| Madrid | Spain | 3332035 | 604 |\n| Rome | Italy | 2748109 | 1285 |\n| Vienna | Austria | 1982097 | 414 |\n| Lisbon | Portugal | 545923 | 100 |",
];

/// Ordinary questions.
pub(crate) const CHAT: [&str; 16] = [
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write a short letter to a friend about a rainy holiday.",
    "What are the advantages of learning a second language?",
    "How do I make a simple tomato soup?",
    "Describe the water cycle for a ten-year-old.",
    "Why do leaves change colour in autumn?",
    "Give me some advice for a job interview.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a story about a lighthouse keeper.",
    "How does a refrigerator work?",
    "What should I see during two days in Rome?",
    "Explain what an operating system does.",
    "Write a short poem about the sea.",
    "How can I sleep better?",
    "What is inflation, and why does it matter?",
];
