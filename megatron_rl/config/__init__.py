"""The configuration: its typed schema, its rules, and the messages that refuse a bad one."""
