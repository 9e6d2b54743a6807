"""Reading runs, from their folder or from MLflow, ours or anybody's."""
