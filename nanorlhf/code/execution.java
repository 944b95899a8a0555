// The two Java programs of execution.py, compiled once per Python process.

import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.PrintStream;
import java.io.StringWriter;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.List;
import javax.tools.Diagnostic;
import javax.tools.DiagnosticCollector;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.StandardJavaFileManager;
import javax.tools.StandardLocation;
import javax.tools.ToolProvider;

/** Runs class Main of a program and reports how it ended: NanoRlhfTests SECRET REPORT, two files. */
class NanoRlhfTests {
    private static final PrintStream ERR = System.err; // the program may replace System.err
    private static int failures;

    /** Called where a test would have thrown for a wrong answer, so that the remaining tests still run. */
    public static synchronized void fail(String message) {
        failures++;
        ERR.println(message);
    }

    public static void main(String[] args) throws Throwable {
        InputStream secret = new FileInputStream(args[0]);
        OutputStream report = new FileOutputStream(args[1]);
        Throwable thrown = null;
        try {
            Method main = Class.forName("Main").getMethod("main", String[].class);
            main.setAccessible(true);
            main.invoke(null, (Object) new String[0]);
        } catch (InvocationTargetException error) {
            thrown = error.getCause();
        } catch (Throwable error) {
            thrown = error;
        }
        String word = "passed";
        if (thrown instanceof OutOfMemoryError) {
            word = "memory";
        } else if (thrown != null) {
            word = isVerdict(thrown) ? "wrong_answer" : "exception";
        } else if (failures > 0) {
            word = "wrong_answer";
        }
        byte[] line = new byte[64];
        int length = secret.read(line); // only now: until here it was in a pipe, not in this process
        byte[] ending = word.getBytes(StandardCharsets.US_ASCII);
        System.arraycopy(ending, 0, line, length, ending.length);
        report.write(line, 0, length + ending.length);
        report.close();
        if (thrown != null) {
            throw thrown;
        }
    }

    /** Whether a test threw for a wrong answer; if not, the program crashed. */
    private static boolean isVerdict(Throwable thrown) {
        StackTraceElement[] frames = thrown.getStackTrace();
        boolean byTheTest = frames.length > 0 && frames[0].getClassName().equals("Main");
        return byTheTest && (thrown.getClass() == Exception.class || thrown.getClass() == AssertionError.class);
    }
}

/** Compiles one program after another: reads (directory, source), writes (compiled, javac's messages). */
class NanoRlhfCompiler {
    public static void main(String[] args) throws IOException {
        DataInputStream in = new DataInputStream(System.in);
        DataOutputStream out = new DataOutputStream(new FileOutputStream(FileDescriptor.out));
        JavaCompiler javac = ToolProvider.getSystemJavaCompiler();
        StandardJavaFileManager files = javac.getStandardFileManager(null, null, StandardCharsets.UTF_8);
        files.setLocation(StandardLocation.CLASS_PATH, List.of(new File(args[0])));
        while (true) { // until the input ends: EOFException
            String directory = new String(in.readNBytes(in.readInt()), StandardCharsets.UTF_8);
            String source = new String(in.readNBytes(in.readInt()), StandardCharsets.UTF_8);
            files.setLocation(StandardLocation.CLASS_OUTPUT, List.of(new File(directory)));
            JavaFileObject file = new SimpleJavaFileObject(URI.create("string:///Main.java"), JavaFileObject.Kind.SOURCE) {
                @Override
                public CharSequence getCharContent(boolean ignoreEncodingErrors) {
                    return source;
                }
            };
            StringWriter crash = new StringWriter(); // what javac prints besides its diagnostics
            DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
            List<String> options = List.of("-proc:none", "-nowarn", "-implicit:none");
            boolean compiled = javac.getTask(crash, files, found, options, null, List.of(file)).call();
            boolean hasError = false;
            StringBuilder messages = new StringBuilder();
            for (Diagnostic<?> diagnostic : found.getDiagnostics()) {
                hasError |= diagnostic.getKind() == Diagnostic.Kind.ERROR;
                messages.append(diagnostic).append('\n');
            }
            if (!compiled && !hasError) {
                throw new IllegalStateException(crash.toString()); // out of memory or stack, or a bug in javac
            }
            byte[] text = messages.toString().getBytes(StandardCharsets.UTF_8);
            out.writeBoolean(compiled);
            out.writeInt(text.length);
            out.write(text);
            out.flush();
        }
    }
}
