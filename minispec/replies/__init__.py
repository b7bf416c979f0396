"""What models write beside plain text, calls of tools and reasoning: how, by which grammar, and found in a reply."""
