"""`python -m minivllm_cli`."""

from minivllm_cli.main import main

if __name__ == "__main__":
    main()
