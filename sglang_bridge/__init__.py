"""Everything that talks to SGLang: server processes, generation, weight updates and audits."""
