"""Other people's trainers and tools: their loops, our weights and traces."""
