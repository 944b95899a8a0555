import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.ByteArrayInputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.StringWriter;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;

import javax.tools.Diagnostic;
import javax.tools.FileObject;
import javax.tools.ForwardingJavaFileManager;
import javax.tools.ForwardingJavaFileObject;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileObject;
import javax.tools.JavaFileManager;
import javax.tools.SimpleJavaFileObject;
import javax.tools.StandardJavaFileManager;
import javax.tools.StandardLocation;
import javax.tools.ToolProvider;

import com.sun.source.util.JavacTask;
import com.sun.source.util.TaskEvent;
import com.sun.source.util.TaskListener;

/**
 * javac without a new process per program: compiles the programs from stdin in memory, in parallel threads.
 *
 *   java Checker.java WORKERS [OPTION OF JAVAC]...          started by nanorlhf/rlcf/compilers.py
 *
 *   request   int id, int size, the program in UTF-16BE     exact for any string, and for javac's offsets
 *   reply     int id, int size, UTF-8: six fields per diagnostic, all separated by NUL:
 *             phase (syntax, semantics or warning), code, start, position, end, message
 *
 * The first reply has the id -1: a small program was compiled, the compiler is warm. Replies come in any order. The
 * process exits when stdin ends. The caller must handle a program that hangs: a thread can't be killed.
 */
public class Checker {
    /** The parser recurses into nested code; with the default 1 MB the result would depend on the JIT. */
    static final long STACK_BYTES = 64 << 20;
    static final String WARM_UP = "import java.util.*; class Ready { List<String> f() { return List.of(\"\"); } }";
    static final Set<StandardLocation> NOT_OURS = Set.of(
        StandardLocation.CLASS_PATH, StandardLocation.SOURCE_PATH, StandardLocation.CLASS_OUTPUT);

    record Request(int id, String program) {}

    public static void main(String[] arguments) throws IOException {
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in));
        DataOutputStream out = new DataOutputStream(new BufferedOutputStream(System.out));
        System.setOut(System.err); // only replies go to stdout
        List<String> options = List.of(arguments).subList(1, arguments.length);
        JavaCompiler compiler = ToolProvider.getSystemJavaCompiler();
        List<String> problems = check(compiler, new Files(compiler), options, WARM_UP);
        if (!problems.isEmpty()) {
            System.err.println(problems.get(problems.size() - 1));
            System.exit(1);
        }
        reply(out, -1, List.of());

        LinkedBlockingQueue<Request> requests = new LinkedBlockingQueue<>();
        for (int i = 0; i < Integer.parseInt(arguments[0]); i++) {
            Thread thread = new Thread(null, () -> work(compiler, options, requests, out), "worker " + i, STACK_BYTES);
            thread.setDaemon(true);
            thread.start();
        }
        try {
            while (true) {
                int id = in.readInt();
                byte[] bytes = new byte[in.readInt()];
                in.readFully(bytes);
                requests.add(new Request(id, new String(bytes, StandardCharsets.UTF_16BE)));
            }
        } catch (EOFException end) {
            // the workers are daemons: the process exits even if one of them hangs
        }
    }

    static void work(
        JavaCompiler compiler, List<String> options, LinkedBlockingQueue<Request> requests, DataOutputStream out
    ) {
        Files files = new Files(compiler); // javac's file managers aren't thread-safe
        try {
            while (true) {
                Request request = requests.take();
                List<String> fields;
                try {
                    fields = check(compiler, files, options, request.program);
                } catch (RuntimeException error) { // from a plug-in: javac catches its own; an OutOfMemoryError ends the process
                    files = new Files(compiler);
                    fields = crash(request.program, error.toString());
                }
                reply(out, request.id, fields);
            }
        } catch (InterruptedException | IOException error) {
            Runtime.getRuntime().halt(1); // the caller is gone
        }
    }

    static void reply(DataOutputStream out, int id, List<String> fields) throws IOException {
        byte[] bytes = String.join("\0", fields).getBytes(StandardCharsets.UTF_8);
        synchronized (out) {
            out.writeInt(id);
            out.writeInt(bytes.length);
            out.write(bytes);
            out.flush();
        }
    }

    static List<String> crash(String program, String message) {
        String end = Integer.toString(program.length());
        return List.of("semantics", "crash", end, end, end, clean("the compiler failed: " + message));
    }

    static String clean(String message) {
        return message.replace('\0', '\uFFFD'); // NUL separates the fields
    }

    /** Compiles a program and discards the class files. Six fields per diagnostic, in the order javac reports them. */
    static List<String> check(JavaCompiler compiler, Files files, List<String> options, String program) {
        List<String> fields = new ArrayList<>();
        boolean[] parsed = {false};
        int[] errors = {0};
        StringWriter log = new StringWriter();
        JavacTask task = (JavacTask) compiler.getTask(log, files, diagnostic -> {
            boolean isError = diagnostic.getKind() == Diagnostic.Kind.ERROR;
            if (isError) {
                errors[0]++;
            } else if (diagnostic.getKind() == Diagnostic.Kind.NOTE || diagnostic.getSource() == null) {
                return;
            }
            fields.add(!isError ? "warning" : parsed[0] ? "semantics" : "syntax");
            fields.add(clean(diagnostic.getCode()));
            fields.add(Long.toString(diagnostic.getStartPosition()));
            fields.add(Long.toString(diagnostic.getPosition()));
            fields.add(Long.toString(diagnostic.getEndPosition()));
            fields.add(clean(diagnostic.getMessage(Locale.ENGLISH)));
        }, options, null, List.of(new Source(program)));
        task.addTaskListener(new TaskListener() {
            @Override public void finished(TaskEvent event) {
                parsed[0] |= event.getKind() == TaskEvent.Kind.PARSE;
            }
        });
        if (!task.call() && errors[0] == 0) {
            return crash(program, log.toString().strip().lines().findFirst().orElse("it gave no reason"));
        }
        return fields;
    }

    /** A program in memory. Its file has the name of its first public class, whatever that is. */
    static final class Source extends SimpleJavaFileObject {
        final String program;
        String publicClass;

        Source(String program) {
            super(URI.create("memory:///Main.java"), Kind.SOURCE);
            this.program = program;
        }

        @Override public CharSequence getCharContent(boolean ignoreEncodingErrors) {
            return program;
        }

        @Override public boolean isNameCompatible(String name, Kind kind) {
            if (publicClass == null && !name.contains("-")) { // not module-info
                publicClass = name;
            }
            return name.equals(publicClass);
        }
    }

    /** Only the JDK's classes, lookups and contents cached; class files are discarded. */
    static final class Files extends ForwardingJavaFileManager<StandardJavaFileManager> {
        final Map<List<Object>, List<JavaFileObject>> packages = new HashMap<>();
        ClassLoader plugins;

        Files(JavaCompiler compiler) {
            super(compiler.getStandardFileManager(null, Locale.ENGLISH, StandardCharsets.UTF_8));
        }

        @Override public Iterable<JavaFileObject> list(
            Location location, String packageName, Set<JavaFileObject.Kind> kinds, boolean recurse
        ) throws IOException {
            if (NOT_OURS.contains(location)) { // a program must not see files of the working directory
                return List.of();
            }
            List<Object> key = List.of(location, packageName, kinds, recurse);
            List<JavaFileObject> classes = packages.get(key);
            if (classes == null) {
                classes = new ArrayList<>();
                for (JavaFileObject file : super.list(location, packageName, kinds, recurse)) {
                    classes.add(new LibraryClass(file, super.inferBinaryName(location, file)));
                }
                packages.put(key, classes);
            }
            return classes;
        }

        @Override public String inferBinaryName(Location location, JavaFileObject file) {
            return file instanceof LibraryClass known ? known.name : super.inferBinaryName(location, file);
        }

        @Override public JavaFileObject getJavaFileForOutput(
            Location location, String className, JavaFileObject.Kind kind, FileObject sibling
        ) {
            return new SimpleJavaFileObject(URI.create("memory:///" + kind), kind) {
                @Override public OutputStream openOutputStream() {
                    return OutputStream.nullOutputStream();
                }
            };
        }

        /** Plug-ins are loaded once: javac would close a URLClassLoader after each program. */
        @Override public ClassLoader getClassLoader(Location location) {
            if (plugins == null) {
                plugins = new ClassLoader(super.getClassLoader(location)) {};
            }
            return plugins;
        }
    }

    static final class LibraryClass extends ForwardingJavaFileObject<JavaFileObject> {
        static final Map<String, byte[]> CONTENTS = new ConcurrentHashMap<>(); // shared by all threads
        final String name;

        LibraryClass(JavaFileObject file, String name) {
            super(file);
            this.name = name;
        }

        @Override public InputStream openInputStream() throws IOException {
            String key = fileObject.toUri().toString();
            byte[] content = CONTENTS.get(key);
            if (content == null) {
                try (InputStream stream = fileObject.openInputStream()) {
                    content = stream.readAllBytes();
                }
                CONTENTS.put(key, content);
            }
            return new ByteArrayInputStream(content);
        }
    }
}
