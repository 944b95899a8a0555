# The tree, its environment and the demo's runs, by the two commands of the README:
#     docker build --tag nanorlhf .
#     docker run --interactive --tty --rm nanorlhf
# With PyTorch for CUDA 13.0: docker build --build-arg TORCH=cu130 --tag nanorlhf .   and   docker run --gpus all ...
FROM python:3.13 AS tools
ARG TORCH=cpu
ENV UV_TORCH_BACKEND=$TORCH
# pip would take PyTorch for CUDA in any case
RUN pip install --no-cache-dir uv
WORKDIR /nanorlhf

# Grades a directory of submissions, as course/README.md says; it needs neither a network nor root
FROM tools AS grade
COPY . .
# nobody can keep bytecode later, and without it every start takes 20 s of a core longer
RUN UV_CONSTRAINT=constraints.txt UV_COMPILE_BYTECODE=1 make .venv/test
# by default as nobody; whoever runs it may have no entry in passwd, and nothing but /tmp to write to
ENV HOME=/tmp USER=grader
USER 65534
ENTRYPOINT [".venv/bin/python", "-m", "course", "grade", "/handed-in", "--format", "csv", "--out", "/grades/grades.csv"]

FROM tools
COPY . .
RUN make demo
RUN make test
CMD ["bash"]
