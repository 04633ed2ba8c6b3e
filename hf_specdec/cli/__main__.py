"""`python -m hf_specdec.cli`, for environments without the script on the path."""

from hf_specdec.cli import main

if __name__ == "__main__":
    main()
