"""What tokens do to answers: accuracy of a model, free or with tokens banned."""
