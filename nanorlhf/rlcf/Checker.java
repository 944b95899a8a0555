import java.io.*;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import javax.tools.*;

import com.sun.source.util.JavacTask;
import com.sun.source.util.TaskEvent;
import com.sun.source.util.TaskListener;

/**
 * Runs javac without a new process per program: compiles programs from stdin in memory, in parallel threads.
 *
 *   java Checker.java WORKERS [OPTION OF JAVAC]...          started by nanorlhf/rlcf/compilers.py
 *
 *   request   int id, int size, the program in UTF-16BE     lossless for any string, and javac's offsets apply
 *   reply     int id, int size, UTF-8: six fields per diagnostic, all separated by NUL:
 *             phase (syntax, semantics or warning), code, start, position, end, message
 *
 * The first reply has the id -1 and comes after a warm-up program was compiled. Replies come in any order. The process
 * exits when stdin ends. The caller must handle a program that hangs: a thread can't be killed.
 */
public class Checker {
    /** The parser recurses into nested code. With the default of 1 MB the result would depend on the JIT. */
    static final long STACK_BYTES = 64 << 20;
    static final String WARM_UP = "import java.util.*; class Ready { List<String> f() { return List.of(\"\"); } }";
    static final Set<StandardLocation> NOT_OURS = Set.of(
        StandardLocation.CLASS_PATH, StandardLocation.SOURCE_PATH, StandardLocation.CLASS_OUTPUT);

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

        ThreadLocal<Files> files = ThreadLocal.withInitial(() -> new Files(compiler)); // not thread-safe
        ExecutorService workers = Executors.newFixedThreadPool(Integer.parseInt(arguments[0]), work -> {
            Thread thread = new Thread(null, work, "worker", STACK_BYTES);
            thread.setDaemon(true); // the process exits even if one of them hangs
            return thread;
        });
        while (true) {
            int id;
            try {
                id = in.readInt();
            } catch (EOFException end) {
                return;
            }
            String program = new String(in.readNBytes(in.readInt()), StandardCharsets.UTF_16BE);
            workers.execute(() -> {
                List<String> fields;
                try {
                    fields = check(compiler, files.get(), options, program);
                } catch (RuntimeException error) { // from a plug-in: javac catches its own exceptions
                    files.remove();
                    fields = crash(program, error.toString());
                }
                try {
                    reply(out, id, fields);
                } catch (IOException gone) { // the caller has exited
                    Runtime.getRuntime().halt(1);
                }
            });
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

    /** Compiles a program and discards the class files. Returns six fields per diagnostic, in the order javac reports them. */
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

    /** A program in memory. Its file gets the name of its first public class. */
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

    /** Finds only the JDK's classes, caches lookups and discards class files. */
    static final class Files extends ForwardingJavaFileManager<StandardJavaFileManager> {
        final Map<List<Object>, Iterable<JavaFileObject>> packages = new HashMap<>();
        ClassLoader plugins;

        Files(JavaCompiler compiler) {
            super(compiler.getStandardFileManager(null, Locale.ENGLISH, StandardCharsets.UTF_8));
        }

        @Override public Iterable<JavaFileObject> list(
            Location location, String packageName, Set<JavaFileObject.Kind> kinds, boolean recurse
        ) throws IOException {
            if (NOT_OURS.contains(location)) { // a program must not see files in the working directory
                return List.of();
            }
            List<Object> key = List.of(location, packageName, kinds, recurse);
            Iterable<JavaFileObject> classes = packages.get(key);
            if (classes == null) {
                classes = super.list(location, packageName, kinds, recurse);
                packages.put(key, classes);
            }
            return classes;
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
}
