"""The vocabulary both roles share: messages, how they travel, phases, what a client remembers, and what parts are."""
