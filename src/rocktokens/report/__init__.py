"""What a person looks at: figures as chart specs and as text, made from plain tables, without a model."""
